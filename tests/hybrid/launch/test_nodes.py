"""Several hosts, as network namespaces: runs over both launchers, a host that dies, a cable that is cut."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from hybrid.train.metrics import read_metrics

from ...processes import SECONDS, started, wait_for_steps
from ..train import tiny
from .namespaces import INTERFACE, Network, network, reason_to_skip

REASON = reason_to_skip()
pytestmark = [pytest.mark.launcher, pytest.mark.skipif(bool(REASON), reason=REASON or "-")]
MINUTE = 60


class Job:
    """One run on the hosts of a network."""

    def __init__(self, net: Network, recipe: Path, folder: Path, *options: str, steps: int) -> None:
        self.net, self.folder, self.output = net, folder, folder / "run"
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("".join(f"{address} slots=1\n" for address in net.addresses))
        self.arguments = [str(recipe), f"train.output={self.output}", f"train.steps={steps}", *options]

    def log(self, host: int) -> Path:
        return self.folder / f"host_{host}.log"

    @contextlib.contextmanager
    def running(self, hosts: list[int], *options: str) -> Iterator[list[Popen]]:
        """The launch command on each of the hosts, which are the whole hostfile's first or all."""
        launch = [sys.executable, "-m", "hybrid", "launch", *self.arguments, "--hostfile", str(self.hostfile)]
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    started(
                        self.net.on(host, [*launch, "--node-rank", str(place), *options]),
                        self.log(host),
                        GLOO_SOCKET_IFNAME=INTERFACE,
                    )
                )
                for place, host in enumerate(hosts)
            ]

    def said(self) -> str:
        return "\n".join(
            f"host {path.stem[5:]}:\n{path.read_text()}" for path in self.folder.glob("host_*.log")
        )


def finish(job: Job, processes: list[Popen]) -> None:
    for process in processes:
        assert process.wait(SECONDS) == 0, job.said()


def alone(rank_pools, recipe: Path, output: Path, steps: int) -> list[tuple[float, ...]]:
    """The series of the same run in one process."""
    rank_pools(1).run(tiny.run, recipe, output, train__steps=steps)
    return tiny.series(output, "train/loss")


def equal(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> bool:
    return found == [pytest.approx(line, rel=1e-5) for line in expected]


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_hosts_train_as_one_process_does(launcher, rank_pools, tiny_recipe, tmp_path):
    with network(2) as net:
        job = Job(net, tiny_recipe, tmp_path, steps=3)
        with job.running([0, 1], "--launcher", launcher) as processes:
            finish(job, processes)
    expected = alone(rank_pools, tiny_recipe, tmp_path / "alone", 3)
    assert equal(tiny.series(job.output, "train/loss"), expected)


@pytest.mark.slow
def test_three_hosts(rank_pools, tiny_recipe, tmp_path):
    with network(3) as net:
        job = Job(net, tiny_recipe, tmp_path, "train.batch_size=6", steps=3)
        with job.running([0, 1, 2], "--launcher", "torchrun") as processes:
            finish(job, processes)
    assert [line[0] for line in tiny.series(job.output)] == [1, 2, 3]
    assert (job.output / "environment.json").read_text().count('"processes": 3') == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
@pytest.mark.parametrize("fault", ["cut", "kill"])
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_host_ends_the_job_on_all_and_another_host_goes_on(
    fault, lost, launcher, tiny_recipe, tmp_path
):
    settings = ["train.batch_size=6", "train.checkpoint_every=5"]
    with network(3) as net:
        job = Job(net, tiny_recipe, tmp_path, *settings, steps=100_000)
        with job.running([0, 1, 2], "--launcher", launcher) as processes:
            wait_for_steps(processes[0], job.output, 12, job.log(0))
            while not (job.output / "checkpoints" / "latest").exists():  # written beside training
                assert processes[0].poll() is None, job.said()
                time.sleep(0.1)
            getattr(net, fault)(lost)
            begin = time.monotonic()
            for process in processes:
                assert process.wait(SECONDS) != 0
            while any(net.processes(host) for host in range(3)) and time.monotonic() - begin < MINUTE:
                time.sleep(0.1)
            took = time.monotonic() - begin
            print(f"host {lost} of 3, {fault}, {launcher}: all had ended after {took:.1f} s")
            assert took < MINUTE, f"{job.said()}\nleft: {net.described()}"
        said = "".join(job.log(host).read_text() for host in range(3) if host != lost)
        assert "lost the connection to another process of this run" in said
        survivor = 1
        step = int((job.output / "checkpoints" / "latest").read_text().removeprefix("step_"))
        job.hostfile.write_text(f"{net.addresses[survivor]} slots=1\n")
        last = max(line["step"] for line in read_metrics(job.output)) + 3
        job.arguments[2] = f"train.steps={last}"
        with job.running([survivor], "--launcher", launcher) as processes:
            finish(job, processes)
    lines = [line for line in read_metrics(job.output) if "train/loss" in line]
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert len({line["run"] for line in lines[:step]}) == 1
    assert {line["run"] for line in lines[step:]} != {lines[0]["run"]}
