"""A training step on one long sequence: cut over two ranks of one thread each, against one such rank.

Both are the training step (DeepSpeed, ZeRO 1) in processes that stay and take turns. Memory is a process's
high-water mark during a step above what it held before: activations, and what operators take for themselves.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hybrid.data.batch import Batch, Segment
from hybrid.distributed import world as distributed
from hybrid.distributed.context_parallel import SequenceRanks
from hybrid.model import HybridLM
from hybrid.recipe import Geometry
from hybrid.recipe.schema import Recipe
from hybrid.train.engine import Engine
from hybrid.train.step import Step

from .memory import measure_once
from .ranks import Ranks
from .report import Row, columns, duration


@dataclass(frozen=True)
class Long:
    """What is trained."""

    pattern: str = "KWRF"
    tokens: int = 16 * 1024
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 1024
    rounds: int = 3

    def recipe(self) -> Recipe:
        found = Recipe()
        found.model.pattern, found.model.hidden_size = self.pattern, self.hidden
        found.model.vocab_size, found.model.defaults = self.vocabulary, {"num_heads": self.heads}
        found.optimizer.lr = 1e-3
        return found


def against_one_rank(long: Long) -> dict[str, Any]:
    """Rows to reach, and the medians measured: seconds, and bytes of the neediest rank."""
    with Ranks(1) as one, Ranks(2) as two:
        teams = {"1 rank": one, "2 ranks": two}
        steps: dict[str, list[tuple[float, int]]] = {name: [] for name in teams}
        for team in teams.values():
            team.call(open_engine, long)
            team.call(take_step)  # not counted: it loads and allocates what stays
        for _ in range(long.rounds):
            for name, team in teams.items():
                taken = team.call(take_step)
                steps[name].append((max(s for s, _ in taken), max(m for _, m in taken)))
    found = {
        name: {"seconds": median(s for s, _ in each), "bytes": median(m for _, m in each)}
        for name, each in steps.items()
    }
    table = [["", "step", "memory of a rank"]]
    for name, cost in found.items():
        table.append([name, duration(cost["seconds"]), f"{cost['bytes'] / 2**20:,.0f} MiB"])
    title = f"A step on one sequence of {long.tokens:,} tokens ({long.pattern}, {long.hidden} wide)"
    print(title + "\n" + columns(table, left={0}))
    first, second = found["1 rank"], found["2 ranks"]
    work, against = "one sequence over 2 ranks", "1 rank"
    speed, memory = first["seconds"] / second["seconds"], second["bytes"] / first["bytes"]
    rows = [
        Row(f"{work}: speed", against, speed, 1.6, ideal=2.0),
        Row(f"{work}: memory", against, memory, 0.6, at_least=False, ideal=0.5),
    ]
    return {"rows": rows, "measured": found, "tokens": long.tokens, "pattern": long.pattern}


_opened: dict[str, Any] = {}
"""What a process keeps between two calls."""


def open_engine(long: Long) -> None:
    world = distributed.start(threads=1)
    recipe = long.recipe()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
        model = HybridLM.from_recipe(recipe)
        engine = Engine(model, recipe, Geometry(world.size, 1, 1, 1), world)
    engine.set_rates(0.01)  # random tokens teach nothing
    ids = torch.randint(0, long.vocabulary, (1, long.tokens + 1))
    borders = torch.tensor([0, long.tokens], dtype=torch.int32)
    batch = Batch(ids[:, :-1], ids[:, 1:], borders, 0, [Segment("random", 0, 0, long.tokens)])
    ranks = SequenceRanks.join(world, world.size)
    _opened["step"] = lambda: Step(engine, world, [batch], ranks=ranks).take()


def take_step() -> tuple[float, int]:
    """Seconds, and bytes at the peak above those before."""
    return measure_once(_opened["step"])
