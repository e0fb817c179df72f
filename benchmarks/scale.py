"""Two processes against one, and what the training loop adds to the engine's work: python -m benchmarks.scale

Processes have one thread each. Those that are compared stay and take turns.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

import torch

from hybrid.data.batch import Batch, Segment
from hybrid.distributed import world
from hybrid.distributed.context_parallel import SequenceRanks
from hybrid.generate.decoding import prefill, read_row
from hybrid.model import HybridLM
from hybrid.recipe import batch_geometry, load
from hybrid.recipe.schema import MonitorSection, Recipe
from hybrid.text import columns, duration
from hybrid.train import train
from hybrid.train.engine import Engine
from hybrid.train.metrics import read_metrics
from hybrid.train.step import Step

from .command import Row, begin, make_parser, run_sections
from .crossing import Crossing
from .measure import Steps, alternate, seconds_and_peak
from .ranks import Ranks


@dataclass(frozen=True)
class Sizes:
    """The quickstart's model with the same batch for any number of processes, and one long sequence."""

    heads: int = 3
    """Of 64 features each."""
    context: int = 1024
    batch: int = 4
    rounds: int = 7
    steps: int = 24
    """Of the training loop; `every` so many a checkpoint, the first three are not counted."""
    every: int = 8
    long_pattern: str = "KWRF"
    long_tokens: int = 16 * 1024
    long_hidden: int = 256
    long_heads: int = 4
    long_rounds: int = 3
    decoded: int = 16
    crossing: Crossing = field(default_factory=Crossing)

    def recipe(self, folder: str = "unused", stage: int = 1) -> Recipe:
        """Load the quickstart's recipe for made-up text in `folder`."""
        changes = {
            "model.hidden_size": 64 * self.heads, "model.defaults.num_heads": self.heads,
            "model.vocab_size": 2048, "data.context": self.context,
            "data.folder": f"{folder}/data", "data.boundaries": "cross", "data.vocab_size": 1024,
            "data.sources": f"{{stdlib: null, bible: null, text: {{paths: [{folder}/text.jsonl]}}}}",
            "train.output": f"{folder}/run", "train.batch_size": self.batch, "train.resume": "never",
            "train.threads": 1, "train.prompts": "[]", "parallel.zero_stage": stage,
            "train.steps": self.steps, "train.checkpoint_every": self.every, "schedule.warmup_steps": 1,
            "monitor.log_every": 1, "monitor.statistics_every": self.every - 2,
        }  # fmt: skip
        return load("quickstart", [f"{key}={value}" for key, value in changes.items()])

    def long_recipe(self, ranks: int) -> Recipe:
        """Make the recipe of one long sequence over `ranks` ranks."""
        found = Recipe()
        found.model.pattern, found.model.hidden_size = self.long_pattern, self.long_hidden
        found.model.vocab_size, found.model.defaults = 1024, {"num_heads": self.long_heads}
        found.data.context, found.train.batch_size = self.long_tokens, 1
        found.optimizer.lr, found.parallel.sequence = 1e-3, ranks
        return found


QUICK = Sizes(
    heads=1, context=64, batch=2, rounds=1, steps=10, every=4, long_pattern="KF", long_tokens=1024,
    long_hidden=32, long_heads=2, long_rounds=1, decoded=2,
    crossing=Crossing((1024,), hidden=32, heads=2, rounds=1),
)  # fmt: skip


def processes(sizes: Sizes) -> dict[str, Any]:
    """Two processes against one, the same batch, at every ZeRO stage."""
    tokens = sizes.batch * sizes.context
    seconds: dict[str, dict[str, float]] = {}
    with Ranks(1) as one, Ranks(2) as two:
        for stage in (1, 2, 3):
            for ranks in (one, two):
                ranks.call(open_engine, sizes.recipe(stage=stage))
            runs = {"1": partial(one.call, take_step), "2": partial(two.call, take_step)}
            seconds[f"ZeRO {stage}"] = alternate(runs, rounds=sizes.rounds)
    table = [["", "1 process", "2 processes", "", "tokens/s"]]
    for name, found in seconds.items():
        ratio = f"{found['1'] / found['2']:.2f}x"
        table.append([name, duration(found["1"]), duration(found["2"]), ratio, f"{tokens / found['2']:,.0f}"])
    print(f"A step of {sizes.batch} x {sizes.context} tokens\n" + columns(table, left={0}))
    first = seconds["ZeRO 1"]
    row = Row("2 processes, ZeRO 1", "1 process, same batch", first["1"] / first["2"], 1.7, ideal=2.0)
    return {"rows": [row], "seconds": seconds, "tokens": tokens}


def sequence(sizes: Sizes) -> dict[str, Any]:
    """A training step on one long sequence cut over two ranks, against one: time, and memory of a rank."""
    taken: dict[str, list[tuple[float, int]]] = {"1 rank": [], "2 ranks": []}
    with Ranks(1) as one, Ranks(2) as two:
        teams = {"1 rank": one, "2 ranks": two}
        for team in teams.values():
            team.call(open_engine, sizes.long_recipe(team.size))
            team.call(take_step)  # not counted: it loads and allocates what stays
        for _ in range(sizes.long_rounds):
            for name, team in teams.items():
                seconds, peaks = zip(*team.call(take_step), strict=True)
                taken[name].append((max(seconds), max(peaks)))
    found = {
        name: {"seconds": median(s for s, _ in each), "bytes": median(m for _, m in each)}
        for name, each in taken.items()
    }
    table = [["", "step", "memory of a rank"]]
    for name, cost in found.items():
        table.append([name, duration(cost["seconds"]), f"{cost['bytes'] / 2**20:,.0f} MiB"])
    shape = f"{sizes.long_tokens:,} tokens ({sizes.long_pattern}, {sizes.long_hidden} wide)"
    print(f"A step on one sequence of {shape}\n" + columns(table, left={0}))
    first, second = found["1 rank"], found["2 ranks"]
    work, against = "one sequence over 2 ranks", "1 rank"
    speed, memory = first["seconds"] / second["seconds"], second["bytes"] / first["bytes"]
    rows = [
        Row(f"{work}: speed", against, speed, 1.6, ideal=2.0),
        Row(f"{work}: memory", against, memory, 0.6, at_least=False, ideal=0.5),
    ]
    return {"rows": rows, "measured": found, "tokens": sizes.long_tokens, "pattern": sizes.long_pattern}


def loop(sizes: Sizes) -> dict[str, Any]:
    """The training loop with its data, logging, statistics and checkpoints against DeepSpeed's bare step."""
    with tempfile.TemporaryDirectory() as folder, Ranks(1) as one:
        _write_text(Path(folder, "text.jsonl"))
        (found,) = one.call(train_watched, sizes.recipe(folder))
    outside = found["step"] - found["engine"] + found["statistics"]
    table = [[name, duration(value)] for name, value in found.items()]
    print("A step of the loop, and in it\n" + columns(table, left={0}))
    around, waiting = 100 * outside / found["engine"], 100 * found["data"] / found["step"]
    rows = [
        Row("the loop around the engine", "the engine's step", around, 2, at_least=False, unit=" %"),
        Row("waiting for data", "a step", waiting, 1, at_least=False, unit=" %"),
        Row("stall of a checkpoint", "a step", found["stall"] / found["step"], 1, at_least=False),
    ]
    return {"rows": rows, "seconds": found}


def packed(sizes: Sizes) -> dict[str, Any]:
    """Decoding of eight sequences of different lengths: together as one packed row, and one by one."""
    count, ids = 8, torch.randint(2048, (sizes.context,), generator=torch.Generator().manual_seed(0))
    lengths = [sizes.context * (i + 1) // count for i in range(count)]
    model = HybridLM.from_recipe(sizes.recipe())

    @torch.no_grad()
    def decoding(rows: list[slice]) -> Callable[[], None]:
        _, states = prefill(model, [ids[:length] for length in lengths])

        @torch.no_grad()
        def run() -> None:
            for row in rows * sizes.decoded:
                _, states[row] = read_row(model, [ids[:1]] * len(states[row]), states[row])

        return run

    one_by_one = [slice(i, i + 1) for i in range(count)]
    times = alternate({"together": decoding([slice(None)]), "one by one": decoding(one_by_one)}, rounds=3)
    rates = {name: count * sizes.decoded / value for name, value in times.items()}
    print(f"Decoding of {count} sequences: " + ", ".join(f"{v:,.0f} tokens/s {n}" for n, v in rates.items()))
    return {"rows": [], "prompts": lengths, "tokens_per_second": rates}


def crossing(sizes: Sizes) -> dict[str, Any]:
    """A KVM layer on one sequence cut over ranks: tokens traded for heads, against its state handed on."""
    return sizes.crossing.compare()


SECTIONS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "processes": processes,
    "loop": loop,
    "sequence": sequence,
    "crossing": crossing,
    "packed": packed,
}


# What the ranks do

_opened: dict[str, Any] = {}
"""What a rank keeps between two calls."""


def open_engine(recipe: Recipe) -> None:
    """Make the engine that `take_step` uses, and this rank's share of a random batch."""
    if "engine" in _opened:
        _opened.pop("engine").close()
    here = world.start(threads=1)
    geometry = batch_geometry(recipe, here.size)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints
        engine = Engine(HybridLM.from_recipe(recipe), recipe, geometry, here)
    engine.set_rates(0.01)  # random tokens teach nothing
    sharing = SequenceRanks.join(here, recipe.parallel.sequence)
    ids = torch.randint(recipe.model.vocab_size or 0, (recipe.train.batch_size, recipe.data.context + 1))
    mine = ids.split(geometry.micro_batch)[here.rank // sharing.size]
    segment = Segment("random", 0, 0, mine[:, 1:].numel())
    batch = Batch(mine[:, :-1].contiguous(), mine[:, 1:].contiguous(), None, 0, [segment])
    _opened.update(engine=engine, step=lambda: Step(engine, here, [batch], ranks=sharing).take())


def take_step() -> tuple[float, int]:
    """Return seconds, and bytes at the peak above those before."""
    return seconds_and_peak(_opened["step"])


def train_watched(recipe: Recipe) -> dict[str, float]:
    """Train; return the seconds of a step and of what is in it."""
    from deepspeed.runtime.engine import DeepSpeedEngine  # here, as it reads the environment of a rank

    steps, stamps = Steps(), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        watched = {(DeepSpeedEngine, name): "engine" for name in ("forward", "backward", "step")}
        stack.enter_context(steps.watching(watched))
        update = DeepSpeedEngine.step

        def stamped(engine: Any) -> Any:
            stamps.append((time.perf_counter(), steps.seconds["engine"]))
            return update(engine)

        stack.enter_context(mock.patch.object(DeepSpeedEngine, "step", stamped))
        train(recipe)
    return _shares(stamps, read_metrics(recipe.train.output))


def _shares(stamps: list[tuple[float, float]], lines: list[dict[str, Any]]) -> dict[str, float]:
    """Take a training run apart.

    Args:
        stamps: when each step's update began, and seconds that the engine had taken until then.
        lines: the run's metrics by step.
    """
    stall, wait = "checkpoint/stall_seconds", "speed/data_wait"
    plain, statistics, waits = [], [], []
    by_step = {line["step"]: line for line in lines}
    for number, (start, end) in enumerate(pairwise(stamps), 1):
        line = by_step[number]
        taken = [after - before for before, after in zip(start, end, strict=True)]
        if number <= 3 or stall in line:
            continue
        if any(name.startswith("layers/") for name in line):
            statistics.append(taken[0])
        else:
            plain.append(taken)
            waits.append(line[wait] * line["speed/step_seconds"])
    whole, engine = (fmean(values) for values in zip(*plain, strict=True))
    return {
        "step": whole,
        "engine": engine,
        "data": fmean(waits),
        "statistics": max(0.0, fmean(statistics) - whole) / MonitorSection().statistics_every,
        "stall": max(line[stall] for line in lines if stall in line),
    }


def _write_text(path: Path) -> None:
    """Write documents of made-up words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(400):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(20, 400)))}) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and keep scale.json in the output folder."""
    given = begin(make_parser(__doc__, SECTIONS), argv)
    run_sections("scale", SECTIONS, QUICK if given.quick else Sizes(), given)


if __name__ == "__main__":
    main()
