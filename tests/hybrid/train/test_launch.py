"""The launch examples, really run, and a process that is killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid.train.launcher import LAUNCHER_VARIABLES
from hybrid.train.monitor import read_metrics

from . import tiny

LAUNCH = Path(__file__).parents[3] / "launch"
SECONDS = 180  # a loaded machine takes a minute to start two processes


@contextlib.contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own, which ends with the block."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env=environment | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.launcher
def test_torchrun_trains_with_one_voice(tiny_recipe: Path, tmp_path: Path):
    """T015: a machine without GPU; libraries' messages go to the logs, one rank talks."""
    log, output = tmp_path / "log", tmp_path / "run"
    command = [str(LAUNCH / "torchrun.sh"), str(tiny_recipe), f"train.output={output}", "train.steps=2"]
    with started(command, log) as process:
        assert process.wait(SECONDS) == 0, log.read_text()
    said = log.read_text()
    progress = r"^step 2/2  loss \d+\.\d{4}  [\d,]+ tokens/s  0:00:00 left$"
    assert len(re.findall(progress, said, re.MULTILINE)) == 1
    assert "DeepSpeed" not in said
    assert "Warning" not in said
    assert [line[0] for line in tiny.series(output)] == [1, 2]
    assert (output / "environment.json").read_text().count('"processes": 2') == 1


@pytest.mark.launcher
def test_two_runs_at_one_port(tiny_recipe: Path, tmp_path: Path):
    """T020: the second names the busy port and ends, the first is unharmed. Locks that a killed build of
    DeepSpeed's left behind do not make anybody wait."""
    for name in ("deepspeed_shm_comm", "cpu_adam", "utils"):
        (tmp_path / "extensions" / name).mkdir(parents=True)
        (tmp_path / "extensions" / name / "lock").touch()
    variables = {"PORT": free_port(), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}

    def command(name: str, steps: int) -> list[str]:
        changes = [f"train.output={tmp_path / name}", f"train.steps={steps}", "train.resume=never"]
        return [str(LAUNCH / "deepspeed.sh"), str(tiny_recipe), *changes]

    logs = tmp_path / "first.log", tmp_path / "second.log"
    with started(command("first", 1000), logs[0], **variables) as first:
        wait_for_steps(first, tmp_path / "first", 1, logs[0])
        with started(command("second", 1), logs[1], **variables) as second:
            assert second.wait(SECONDS) != 0
        assert f":{variables['PORT']} is busy" in logs[1].read_text()
        assert first.poll() is None
        before = len(read_metrics(tmp_path / "first"))
        wait_for_steps(first, tmp_path / "first", before + 1, logs[0])


def wait_for_steps(process: subprocess.Popen, output: Path, count: int, log: Path) -> None:
    """Until a run has logged `count` lines."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if (output / "metrics.jsonl").read_text().count("\n") >= count:
                return
        time.sleep(0.01)
    raise AssertionError(f"no {count} steps in time:\n{log.read_text()}")


@pytest.mark.ranks
def test_killed_at_a_random_step_it_goes_on_exactly(rank_pools, tiny_recipe: Path, tmp_path: Path):
    """SIGKILL gives no chance to save; the series is that of a run that was left alone."""
    settings = {"train__steps": 60, "train__checkpoint_every": 7, "train__keep_last": 2}
    rank_pools(1).run(tiny.run, tiny_recipe, tmp_path / "whole", **settings)
    output = tmp_path / "killed"
    changes = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    command = [sys.executable, "-m", "hybrid", "train", str(tiny_recipe), f"train.output={output}", *changes]
    with started(command, tmp_path / "log") as process:
        wait_for_steps(process, output, random.Random().randint(12, 50), tmp_path / "log")
        process.kill()
        process.wait()
    rank_pools(1).run(tiny.run, tiny_recipe, output, **settings)
    assert tiny.series(output) == tiny.series(tmp_path / "whole")
    assert len({line["run"] for line in read_metrics(output, every_run=True)}) == 2
