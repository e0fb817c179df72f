"""A run that hangs ends by itself, and shows where."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.distributed.watchdog import compilation_takes_time, compiled_kernels_are_progress
from hybrid.distributed.world import World
from hybrid.errors import LOST_EXIT_CODE

from ..train import processes, tiny

pytestmark = pytest.mark.ranks


def stand_still_for_ever() -> None:
    while True:
        time.sleep(1)


def slow_then_hung(arguments: list[str]) -> int:
    """Rank 1 takes longer than allowed over its second step, and says that it may; its third never ends."""
    from hybrid.train import loop

    taken = []

    class SlowStep(loop.Step):
        def __init__(self, engine: Any, world: World, *args: Any, **kwargs: Any) -> None:
            taken.append(0)
            if not world.main and len(taken) > 2:
                stand_still_for_ever()
            if not world.main and len(taken) == 2:
                with world.heartbeat.no_timeout("long work"):
                    time.sleep(12)
            super().__init__(engine, world, *args, **kwargs)

    with tiny.patched(loop, "Step", SlowStep):
        return processes.train(arguments)


def test_a_rank_that_hangs_is_named_and_shown(tiny_recipe: Path, tmp_path: Path):
    """Not one that only takes its time: the second step, longer than the limit, does no harm."""
    with processes.started(
        tiny_recipe, tmp_path / "run", 2, tmp_path / "log", slow_then_hung, train__hang_timeout=15
    ) as ranks:
        assert ranks.wait_for_steps(tmp_path / "run", 2), ranks.said()
        begin = time.monotonic()
        assert ranks.exit_codes(60) == [LOST_EXIT_CODE] * 2
        assert time.monotonic() - begin < 30
    said = ranks.said()
    assert re.search(r"rank \d of 2 ends, as the run hangs: nobody made progress for 9 s", said)
    assert "rank 1 is what the others wait for" in said
    assert "rank 1: step 3, heard" in said
    assert "rank 0: step 3 (waits), heard" in said
    # Both show their stacks, on the terminal and in their logs.
    assert said.count("in stand_still_for_ever") == 1
    assert "in gather_numbers" in said
    assert "in stand_still_for_ever" in (tmp_path / "run" / "logs" / "rank_1.log").read_text()


def test_compilation_may_take_its_time():
    world, seen = World(0, 1, 0, 1, torch.device("cpu")), []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        seen.append(world.heartbeat.untimed)
        return graph.forward

    with compilation_takes_time(world):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert (seen, world.heartbeat.untimed) == ([1], 0)


def test_every_kernel_that_triton_compiles_is_progress(monkeypatch):
    """Autotuning tries hundreds in the first step; the hook that was there before is called as well."""
    runtime = pytest.importorskip("triton").knobs.runtime
    world, called = World(0, 1, 0, 1, torch.device("cpu")), []
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **given: called.append(given))
    before, beats = runtime.jit_post_compile_hook, world.heartbeat.beats
    with compiled_kernels_are_progress(world):
        for _ in range(3):
            runtime.jit_post_compile_hook(key="k")
    assert runtime.jit_post_compile_hook is before
    assert world.heartbeat.beats == beats + 3
    assert called == [{"key": "k"}] * 3
