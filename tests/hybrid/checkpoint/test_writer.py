"""Whole runs whose checkpoints are written, or not, while they train."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint.folder import tags_in
from hybrid.train.metrics import read_metrics

from ..train import tiny

pytestmark = pytest.mark.ranks


def full_disk(path: Path, output: Path, **overrides: Any) -> Any:
    """Rank 1's disk is full when the second checkpoint is written."""
    from hybrid.checkpoint import tensor_files

    true_write, written = tensor_files.write, []

    def write(file: Path, *rest: Any) -> tuple[int, str]:
        written.append(file)
        if os.environ["RANK"] == "1" and len(written) == 2:
            raise OSError(28, "No space left on device", str(file))
        return true_write(file, *rest)

    with tiny.patched(tensor_files, "write", write):
        return tiny.run(path, output, train__checkpoint_every=2, **overrides)


def test_a_full_disk_does_not_stop_training(two_ranks, tiny_recipe: Path, tmp_path: Path):
    """The old checkpoint is kept, and the next one is written when there is room again."""
    found = two_ranks.run(full_disk, tiny_recipe, tmp_path, train__steps=6)
    assert [summary.steps for summary in found] == [6, 6]
    assert tags_in(tmp_path / "checkpoints") == ["step_00000002", "step_00000006"]
    values = [line for line in read_metrics(tmp_path) if "checkpoint/failures" in line]
    assert [(line["step"], line["checkpoint/failures"]) for line in values] == [(4, 1)]
    stalls = [line["step"] for line in read_metrics(tmp_path) if "checkpoint/stall_seconds" in line]
    assert stalls == [2, 4, 6]


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(two_ranks, tiny_recipe: Path, tmp_path: Path):
    main, other = two_ranks.run(full_disk, tiny_recipe, tmp_path)
    assert main[0] == "TrainError"
    assert "rank 1 of 2: No space left on device" in main[1]
    assert "the newest good checkpoint is step_00000002" in main[1]
    assert other == ("SystemExit", "2")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_00000002"]


def long_step(path: Path, output: Path, **overrides: Any) -> list[list[str]]:
    """The checkpoints there are before each pass of the last step, all writers having done their work."""
    from hybrid.train.engine import Engine

    true_forward, seen = Engine.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        for thread in threading.enumerate():
            if thread.name == "checkpoint writer":
                thread.join()
        seen.append(tags_in(output / "checkpoints"))
        return true_forward(*args, **kwargs)

    with tiny.patched(Engine, "forward", forward):
        tiny.run(path, output, train__checkpoint_every=1, train__steps=2, **overrides)
    return seen[len(seen) // 2 :]


def test_a_checkpoint_need_not_wait_for_the_end_of_a_step(two_ranks, tiny_recipe: Path, tmp_path: Path):
    """A step of many passes may take minutes, and a kill in it must not cost what was saved before."""
    found = two_ranks.run(long_step, tiny_recipe, tmp_path, train__batch_size=8, train__micro_batch_size=1)
    assert [len(passes) for passes in found] == [4, 4]
    assert all(passes[0] == [] and passes[-1] == ["step_00000001"] for passes in found)
