"""A process that is killed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from hybrid.train.monitor import read_metrics

from ...processes import started, wait_for_steps
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
