"""What the processes of `hybrid bench scale` do."""

from __future__ import annotations

import contextlib
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybrid import recipe as recipes
from hybrid.checkpoint.run import opened
from hybrid.data.batch import Batch, Segment
from hybrid.data.preparation.prepare import prepare
from hybrid.distributed import world as distributed
from hybrid.distributed.signals import Signals
from hybrid.model import HybridLM
from hybrid.recipe.schema import Recipe
from hybrid.train.engine import Engine
from hybrid.train.hooks import layer_statistics
from hybrid.train.loop import Run, save
from hybrid.train.loop import take_step as take_loop_step
from hybrid.train.step import Step
from hybrid.train.trainer import build, quiet

from .crossing import Crossing
from .sequence import Long
from .timing import Steps


@dataclass(frozen=True)
class Sizes:
    """The quickstart's model, and the same batch for any number of processes."""

    heads: int = 3
    """Of 64 features each."""
    context: int = 1024
    batch: int = 4
    rounds: int = 7
    loop_steps: int = 20
    saves: int = 3
    long: Long = field(default_factory=Long)
    crossing: Crossing = field(default_factory=Crossing)

    def recipe(self, folder: str = "unused", stage: int = 1) -> Recipe:
        changes = {
            "model.hidden_size": 64 * self.heads, "model.defaults.num_heads": self.heads,
            "model.vocab_size": 2048, "data.context": self.context,
            "data.folder": f"{folder}/data", "data.boundaries": "cross", "data.vocab_size": 1024,
            "data.sources": f"{{stdlib: null, bible: null, text: {{paths: [{folder}/text.jsonl]}}}}",
            "train.output": f"{folder}/run", "train.batch_size": self.batch, "train.resume": "never",
            "train.threads": 1, "train.prompts": "[]", "parallel.zero_stage": stage,
        }  # fmt: skip
        return recipes.load("quickstart", [f"{key}={value}" for key, value in changes.items()])


QUICK = Sizes(
    heads=1, context=64, batch=2, rounds=1, loop_steps=3, saves=1,
    long=Long("KF", tokens=1024, hidden=32, heads=2, rounds=1),
    crossing=Crossing((1024,), hidden=32, heads=2, rounds=1),
)  # fmt: skip

_opened: dict[str, Any] = {}
"""What a process keeps between two calls."""


def open_engine(sizes: Sizes, stage: int) -> None:
    """Make the engine that `take_step` uses; every rank has its part of the same random batch."""
    close_engine()
    world = distributed.start(threads=1)
    recipe = sizes.recipe(stage=stage)
    geometry = recipes.batch_geometry(recipe, world.size)
    torch.manual_seed(0)
    ids = torch.randint(2048, (sizes.batch, sizes.context + 1))
    mine = ids.split(geometry.micro_batch)[world.rank]
    segment = Segment("random", 0, 0, mine[:, 1:].numel())
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
        engine = Engine(HybridLM.from_recipe(recipe), recipe, geometry, world)
    batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), None, 0, [segment])
    engine.set_rates(0.01)  # random tokens teach nothing
    _opened.update(engine=engine, world=world, batches=[batch])


def take_step() -> None:
    Step(_opened["engine"], _opened["world"], _opened["batches"]).take()


def close_engine() -> None:
    if "engine" in _opened:
        _opened.pop("engine").close()


def loop(sizes: Sizes, folder: str) -> dict[str, float]:
    """Seconds of a step of the whole training loop, and what of it is not the engine's own work."""
    _write_text(Path(folder) / "text.jsonl")
    world = distributed.start(threads=1)
    recipe = sizes.recipe(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        log = stack.enter_context(quiet(Path(recipe.train.output) / "logs" / "rank_0.log"))
        prepare(recipe.data, processes=1)
        stack.enter_context(opened(Path(recipe.train.output)))
        run = build(recipe, world, Signals(), log, stack)
        return _measured(run, sizes)


def _measured(run: Run, sizes: Sizes) -> dict[str, float]:
    engine, steps = run.engine.deepspeed, Steps()
    for _ in range(3):
        take_loop_step(run)
    begin, waited, batches = time.perf_counter(), 0.0, []
    with steps.watching(
        (engine, "forward", "engine"), (engine, "backward", "engine"), (engine, "step", "engine")
    ):
        for _ in range(sizes.loop_steps):
            done = take_loop_step(run)
            waited, batches = waited + done.waited, done.batches
    whole = time.perf_counter() - begin
    statistics = _seconds(lambda: layer_statistics(run, batches[0])) / run.recipe.monitor.statistics_every
    return {
        "step": whole / sizes.loop_steps,
        "engine": steps.seconds["engine"] / sizes.loop_steps,
        "data": waited / sizes.loop_steps,
        "statistics": statistics,
        "stall": max(_stalls(run, sizes.saves)),
    }


def _stalls(run: Run, saves: int) -> Iterator[float]:
    """Seconds that training stands still for a checkpoint that is written beside it."""
    for _ in range(saves):
        take_loop_step(run)
        yield _seconds(lambda: save(run))
        run.writer.wait()


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _write_text(path: Path) -> None:
    """Documents of made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(400):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(20, 400)))}) + "\n")
