"""`hybrid launch` really starting processes of this machine."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from hybrid.distributed.environment import free_port
from hybrid.errors import STOPPED_EXIT_CODE
from hybrid.train.metrics import read_metrics

from ...processes import SECONDS, started, wait_for_steps, wait_until_it_catches_sigterm
from ..train import tiny


def launch(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hybrid", "launch", *map(str, arguments)]


@pytest.mark.launcher
def test_torchrun_trains_with_one_voice(tiny_recipe: Path, tmp_path: Path):
    """deepspeedai/DeepSpeed#943, #3991: a machine without GPU; libraries' messages go to the logs, one rank
    talks."""
    log, output = tmp_path / "log", tmp_path / "run"
    changes = [f"train.output={output}", "train.steps=2"]
    with started(launch(tiny_recipe, *changes, "--launcher", "torchrun", "--gpus", 2), log) as process:
        assert process.wait(SECONDS) == 0, log.read_text()
    said = log.read_text()
    assert f"torchrun --standalone --nproc_per_node 2 -m hybrid train {tiny_recipe}" in said
    progress = r"^step 2/2  loss \d+\.\d{4}  [\d,]+ tokens/s  0:00:00 left$"
    assert len(re.findall(progress, said, re.MULTILINE)) == 1
    assert "DeepSpeed" not in said
    assert "Warning" not in said
    assert [line[0] for line in tiny.series(output)] == [1, 2]
    assert (output / "environment.json").read_text().count('"processes": 2') == 1


@pytest.mark.launcher
def test_two_runs_at_one_port(tiny_recipe: Path, tmp_path: Path):
    """huggingface/accelerate#953: the second names the busy port and ends, the first is unharmed. Locks that
    a killed build of DeepSpeed's left behind do not make anybody wait."""
    for name in ("deepspeed_shm_comm", "cpu_adam", "utils"):
        (tmp_path / "extensions" / name).mkdir(parents=True)
        (tmp_path / "extensions" / name / "lock").touch()
    port, variables = free_port(), {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}

    def command(name: str, steps: int) -> list[str]:
        changes = [f"train.output={tmp_path / name}", f"train.steps={steps}", "train.resume=never"]
        return launch(tiny_recipe, *changes, "--gpus", 2, "--master-port", port)

    logs = tmp_path / "first.log", tmp_path / "second.log"
    with started(command("first", 1000), logs[0], **variables) as first:
        wait_for_steps(first, tmp_path / "first", 1, logs[0])
        with started(command("second", 1), logs[1], **variables) as second:
            assert second.wait(SECONDS) == 2
        assert f"port {port} of 127.0.0.1 is busy" in logs[1].read_text()
        assert first.poll() is None
        before = len(read_metrics(tmp_path / "first"))
        wait_for_steps(first, tmp_path / "first", before + 1, logs[0])


@pytest.mark.launcher
@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_sigterm_to_the_launch_command_saves_and_ends(launcher: str, tiny_recipe: Path, tmp_path: Path):
    """DeepSpeed's launcher alone would die of it and leave the processes training."""
    log, output = tmp_path / "log", tmp_path / "run"
    command = launch(tiny_recipe, f"train.output={output}", "train.steps=100000", "--launcher", launcher)
    with started([*command, "--gpus", "2"], log) as process:
        wait_for_steps(process, output, 3, log)
        process.terminate()
        code = process.wait(SECONDS)
        assert code == (STOPPED_EXIT_CODE if launcher == "deepspeed" else 1), log.read_text()
    (stopped,) = re.findall(r"stopped by SIGTERM after step (\d+)", log.read_text())
    assert (output / "checkpoints" / "latest").read_text().strip() == f"step_{int(stopped):08}"


@pytest.mark.launcher
def test_sigterm_while_the_launcher_starts(tiny_recipe: Path, tmp_path: Path):
    command = launch(tiny_recipe, f"train.output={tmp_path / 'run'}", "train.steps=1000", "--gpus", 1)
    with started(command, tmp_path / "log") as process:
        while "deepspeed" not in (tmp_path / "log").read_text():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        wait_until_it_catches_sigterm(process.pid)
        process.terminate()
        assert process.wait(SECONDS) == STOPPED_EXIT_CODE
