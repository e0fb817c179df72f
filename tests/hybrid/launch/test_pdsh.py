"""All hosts started from one of them by DeepSpeed, over pdsh and ssh."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from hybrid.errors import STOPPED_EXIT_CODE
from hybrid.train.metrics import read_metrics

from ...processes import SECONDS, started, wait_for_steps
from ..train import tiny
from . import shells
from .namespaces import INTERFACE, Network, network, reason_to_skip

REASON = reason_to_skip()
pytestmark = [pytest.mark.launcher, pytest.mark.skipif(bool(REASON), reason=REASON or "-")]
MISSING = ", ".join(shells.missing())
needs_pdsh = pytest.mark.skipif(bool(MISSING), reason=f"pdsh over sshd needs programs not here: {MISSING}")
Shells = Callable[[Network, Path], AbstractContextManager[Path]]

NAME = "my run (1) $HOME %n `id` 'a' \"b\" \\"
"""A folder's name that pdsh and a shell on each host would read otherwise."""


class Job:
    """A run that the first host of a network starts on all."""

    def __init__(self, net: Network, recipe: Path, folder: Path, programs: Path) -> None:
        self.net, self.folder, self.programs = net, folder, programs
        self.output, self.log = folder / NAME, folder / "log"
        self.arguments = [str(recipe), f"train.output={self.output}", "model.pattern=(FW)"]
        (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in net.addresses))
        (folder / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={INTERFACE}\n")

    @contextmanager
    def running(self, steps: int) -> Iterator[Popen]:
        command = [sys.executable, "-m", "hybrid", "launch", *self.arguments, f"train.steps={steps}"]
        command += ["--hostfile", str(self.folder / "hosts")]
        path = f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        with started(self.net.on(0, command), self.log, HOME=str(self.folder), PATH=path) as process:
            yield process

    def rank_on(self, host: int) -> int:
        """The process that trains there."""
        (found,) = (
            pid
            for pid in self.net.processes(host)
            if b"--local_rank=0" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )
        return found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(shells.stand_ins, id="stand_ins"),
        pytest.param(shells.real_ones, id="pdsh_and_sshd", marks=[needs_pdsh, pytest.mark.slow]),
    ],
)
def test_one_command_starts_all_hosts_and_ends_with_their_code(kind: Shells, tiny_recipe, tmp_path):
    """Stopped by SIGTERM to the process of another host, and gone on with to the end."""
    with network(2) as net, kind(net, tmp_path) as programs:
        job = Job(net, tiny_recipe, tmp_path, programs)
        with job.running(100_000) as process:
            wait_for_steps(process, job.output, 5, job.log)
            os.kill(job.rank_on(1), signal.SIGTERM)
            assert process.wait(SECONDS) == STOPPED_EXIT_CODE, job.log.read_text()
        last = len(tiny.series(job.output)) + 2
        with job.running(last) as process:
            assert process.wait(SECONDS) == 0, job.log.read_text()
    lines = [line for line in read_metrics(job.output) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert len({line["run"] for line in lines}) == 2
    assert '"processes": 2' in (job.output / "environment.json").read_text()


@needs_pdsh
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "kill"])
def test_the_command_ends_within_a_minute_of_a_lost_host(fault, tiny_recipe, tmp_path):
    """sshd of the lost host says nothing more: without ssh's own questions pdsh would wait for ever."""
    with network(2) as net, shells.real_ones(net, tmp_path) as programs:
        job = Job(net, tiny_recipe, tmp_path, programs)
        with job.running(100_000) as process:
            wait_for_steps(process, job.output, 5, job.log)
            getattr(net, fault)(1)
            begin = time.monotonic()
            assert process.wait(SECONDS) not in (0, 2, STOPPED_EXIT_CODE)
            assert time.monotonic() - begin < 60, job.log.read_text()


def test_a_host_that_ssh_does_not_reach_is_named_and_nothing_starts(tiny_recipe, tmp_path):
    with network(2) as net, shells.stand_ins(net, tmp_path) as programs:
        job = Job(net, tiny_recipe, tmp_path, programs)
        with (tmp_path / "hosts").open("a") as file:
            file.write("10.77.0.99 slots=1\n")
        job.arguments.append("train.batch_size=3")
        with job.running(1) as process:
            assert process.wait(SECONDS) == 2, job.log.read_text()
    assert job.log.read_text() == (
        "hybrid: error: ssh does not get into 10.77.0.99 (ssh: Could not resolve hostname 10.77.0.99); "
        "nothing was launched\n"
    )
