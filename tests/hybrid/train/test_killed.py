"""A process that is killed, or asked to stop before it trains."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint.folder import tags_in
from hybrid.distributed.environment import free_port
from hybrid.errors import STOPPED_EXIT_CODE
from hybrid.train.metrics import read_metrics

from ...processes import SECONDS, started, wait_for_steps, wait_until_it_catches_sigterm
from . import tiny


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


STOPPED = "hybrid: stopped by SIGTERM outside training; the same command goes on\n"


def test_sigterm_while_it_imports(tiny_recipe: Path, tmp_path: Path):
    command = [sys.executable, "-m", "hybrid", "train", str(tiny_recipe), f"train.output={tmp_path / 'run'}"]
    with started(command, tmp_path / "log") as process:
        wait_until_it_catches_sigterm(process.pid)
        process.terminate()
        assert process.wait(SECONDS) == STOPPED_EXIT_CODE
    assert (tmp_path / "log").read_text() == STOPPED
    assert not (tmp_path / "run").exists()


def test_sigterm_while_a_library_has_turned_standard_error_away():
    """DeepSpeed does so while it tries a compiler."""
    code = (
        "import os, signal, time; from hybrid.distributed.signals import ending_at_once\n"
        "with ending_at_once():\n"
        "    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == STOPPED_EXIT_CODE
    assert "stopped by SIGTERM outside training" in done.stderr


def test_sigterm_while_it_waits_for_the_others(tiny_recipe: Path, tmp_path: Path):
    """In code of torch's that knows no signals, for up to five minutes."""
    command = [sys.executable, "-m", "hybrid", "train", str(tiny_recipe), f"train.output={tmp_path / 'run'}"]
    port = free_port()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with started(command, tmp_path / "log", MASTER_PORT=str(port), **place) as process:
        begin = time.monotonic()
        while True:  # until it listens
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() - begin < SECONDS
            time.sleep(0.01)
        process.terminate()
        assert process.wait(30) == STOPPED_EXIT_CODE
    assert (tmp_path / "log").read_text() == STOPPED


def asked_to_stop_while_it_builds(path: Path, output: Path, rank: int) -> Any:
    import torch

    from hybrid.model import HybridLM

    true_build = HybridLM.from_recipe

    def build(*args: Any) -> Any:
        if torch.distributed.get_rank() == rank:
            signal.raise_signal(signal.SIGTERM)
        return true_build(*args)

    with tiny.patched(HybridLM, "from_recipe", build):
        return tiny.run(path, output)


@pytest.mark.ranks
def test_sigterm_while_the_model_is_built_ends_all_before_a_step(two_ranks, tiny_recipe, tmp_path):
    run = asked_to_stop_while_it_builds
    assert two_ranks.run(run, tiny_recipe, tmp_path / "run", 1) == [("SystemExit", "75")] * 2
    assert not tags_in(tmp_path / "run" / "checkpoints")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    summary, _ = two_ranks.run(tiny.run, tiny_recipe, tmp_path / "run")
    assert summary.steps == 4


def stopped_within(path: Path, output: Path, step: int, **overrides: Any) -> Any:
    """A run in which rank 1 gets SIGTERM after the third pass of a step."""
    from hybrid.train.hooks import StopSignals

    true_after_backward = StopSignals.after_backward

    def after_backward(hook: Any, run: Any, passes: int) -> None:
        if run.progress.step + 1 == step and run.world.rank == 1 and passes == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        true_after_backward(hook, run, passes)

    with tiny.patched(StopSignals, "after_backward", after_backward):
        return tiny.run(path, output, **overrides)


@pytest.mark.parametrize(("stage", "step"), [(0, 1), (2, 3), (3, 2)])
def test_a_step_of_many_passes_is_left_and_taken_again(
    two_ranks, tiny_recipe: Path, tmp_path: Path, stage: int, step: int
):
    """It may take minutes, more than a pre-empted job is given."""
    many = {"train__batch_size": 36, "train__micro_batch_size": 2, "train__steps": 3}
    many["parallel__zero_stage"] = stage
    found = two_ranks.run(stopped_within, tiny_recipe, tmp_path / "halves", step, **many)
    assert found == [("SystemExit", "75")] * 2
    assert len(tiny.series(tmp_path / "halves")) == step - 1
    two_ranks.run(tiny.run, tiny_recipe, tmp_path / "halves", **many)
    two_ranks.run(tiny.run, tiny_recipe, tmp_path / "straight", **many)
    assert tiny.series(tmp_path / "halves") == tiny.series(tmp_path / "straight")


def stopped_while_scoring(path: Path, output: Path, step: int, **overrides: Any) -> Any:
    """A run in which rank 1 gets SIGTERM in the evaluation after a step."""
    from hybrid.train.hooks import StopSignals

    true_after_scored = StopSignals.after_scored

    def after_scored(hook: Any, run: Any) -> None:
        if run.progress.step == step and run.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        true_after_scored(hook, run)

    with tiny.patched(StopSignals, "after_scored", after_scored):
        return tiny.run(path, output, **overrides)


@pytest.mark.parametrize(("stage", "step", "every"), [(1, 0, 0), (1, 2, 2), (3, 2, 2), (1, 4, 2), (1, 4, 0)])
def test_an_evaluation_is_left_and_nothing_is_lost(
    two_ranks, tiny_recipe: Path, tmp_path: Path, stage: int, step: int, every: int
):
    """It may take minutes; the step before it is saved, also where it was the last."""
    keys = {"parallel__zero_stage": stage, "train__eval_every": every}
    found = two_ranks.run(stopped_while_scoring, tiny_recipe, tmp_path / "halves", step, **keys)
    assert found == [("SystemExit", "75")] * 2
    assert tags_in(tmp_path / "halves" / "checkpoints") == ([f"step_{step:08d}"] if step else [])
    last = [line for line in read_metrics(tmp_path / "halves") if line["step"] == step]
    assert not any("validation/loss" in line for line in last)
    halves = two_ranks.run(tiny.run, tiny_recipe, tmp_path / "halves", **keys)
    straight = two_ranks.run(tiny.run, tiny_recipe, tmp_path / "straight", **keys)
    assert tiny.series(tmp_path / "halves")[-1:] == tiny.series(tmp_path / "straight")[-1:]
    assert halves[0].bits_per_byte == straight[0].bits_per_byte
    assert halves[0].bits_per_byte_before == straight[0].bits_per_byte_before


def stopped_while_reading(path: Path, output: Path, **overrides: Any) -> Any:
    """A run in which rank 1 gets SIGTERM while the first step's batches are read."""
    from hybrid.data.loader import Loader

    true_next, read = Loader.__next__, []

    def signalled_next(loader: Any) -> Any:
        read.append(0)
        if len(read) == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return true_next(loader)

    with tiny.patched(Loader, "__next__", signalled_next):
        return tiny.run(path, output, **overrides), len(read)


def test_reading_the_batches_of_a_long_step_ends_too(two_ranks, tiny_recipe: Path, tmp_path: Path):
    many = {"train__batch_size": 200000, "train__micro_batch_size": 1}
    found = two_ranks.run(stopped_while_reading, tiny_recipe, tmp_path, **many)
    assert found == [(("SystemExit", "75"), 64)] * 2
