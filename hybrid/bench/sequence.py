"""A training step on one long sequence: cut over ranks of one thread each, against one such rank.

Both are real runs of the training step (DeepSpeed, ZeRO 1), in processes that stay and take turns. Memory is
each process's high-water mark during a step, above what it held before: activations, and what operators take.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from .memory import measure_once
from .report import BenchError, Row

PATTERN = "KWRF"
TOKENS = 16 * 1024
HIDDEN, HEADS, VOCABULARY = 256, 4, 1024
SPEED, MEMORY = 1.6, 0.6
"""Targets for two ranks: times as fast, and share of the memory of one."""


@dataclass(frozen=True)
class Found:
    """Medians of one way to train."""

    ranks: int
    seconds: float
    memory: int
    """Bytes of the neediest rank."""


def sequence_scale(
    pattern: str = PATTERN, tokens: int = TOKENS, *, ranks: int = 2, rounds: int = 3
) -> tuple[list[Row], dict[str, Any]]:
    """Rows to reach, and what was measured. Needs a core for each rank."""
    with contextlib.ExitStack() as stack:
        teams = {size: stack.enter_context(_team(size, pattern, tokens)) for size in (1, ranks)}
        steps: dict[int, list[tuple[float, int]]] = {size: [] for size in teams}
        for number in range(rounds + 1):
            for size, team in teams.items():
                answers = _step(team)
                if number:  # the first one warms up
                    seconds, memory = zip(*answers, strict=True)
                    steps[size].append((max(seconds), max(memory)))
    one, several = (
        Found(size, median(s for s, _ in found), int(median(m for _, m in found)))
        for size, found in steps.items()
    )
    work, against = f"'{pattern}', {tokens:,} tokens over {ranks} ranks", "one rank"
    rows = [
        Row(f"{work}: speed", against, one.seconds / several.seconds, SPEED, ideal=float(ranks)),
        Row(f"{work}: memory", against, several.memory / one.memory, MEMORY, at_least=False, ideal=1 / ranks),
    ]
    return rows, {"rows": rows, "measured": [vars(one), vars(several)]}


Team = list["subprocess.Popen[str]"]


@contextlib.contextmanager
def _team(size: int, pattern: str, tokens: int) -> Iterator[Team]:
    """`size` processes that share a sequence and take a step whenever they are told to."""
    from ..train.launcher import free_port

    port, team = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                place = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
                    "DS_ACCELERATOR": "cpu",
                }  # fmt: skip
                command = [sys.executable, "-m", "hybrid.bench.sequence", pattern, str(tokens)]
                with (Path(folder) / f"{rank}").open("w") as log:
                    team.append(
                        subprocess.Popen(
                            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                            env={**os.environ, **{name: str(value) for name, value in place.items()}},
                        )
                    )  # fmt: skip
            yield team
        except (BrokenPipeError, json.JSONDecodeError) as error:
            said = "\n".join((Path(folder) / f"{rank}").read_text()[-2000:] for rank in range(size))
            raise BenchError(f"a rank of {size} ended:\n{said}") from error
        finally:
            for process in team:
                process.kill()
                process.wait()


def _step(team: Team) -> list[tuple[float, int]]:
    """Seconds and bytes of every rank for one step."""
    for process in team:
        assert process.stdin is not None
        process.stdin.write("step\n")
        process.stdin.flush()
    return [tuple(json.loads(process.stdout.readline())) for process in team if process.stdout is not None]


def main(arguments: Sequence[str]) -> None:
    """A rank: for every line of input a step, and a line of output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    pattern, tokens = arguments[0], int(arguments[1])
    run = _training_step(pattern, tokens)
    for _ in sys.stdin:
        print(json.dumps(measure_once(run)), file=answers, flush=True)


def _training_step(pattern: str, tokens: int) -> Any:
    import torch

    from ..data.rows import Batch, Segment
    from ..model import HybridLM
    from ..recipe import Geometry
    from ..schema import Recipe
    from ..train import distributed, step
    from ..train.engine import Engine
    from ..train.sequence import SequenceRanks
    from ..train.signals import Signals

    world = distributed.start(1)
    recipe = Recipe()
    model = recipe.model
    model.pattern, model.hidden_size, model.vocab_size = pattern, HIDDEN, VOCABULARY
    model.defaults = {"num_heads": HEADS}
    recipe.optimizer.lr, recipe.parallel.sequence = 1e-3, world.size
    torch.manual_seed(0)
    engine = Engine(HybridLM.from_recipe(recipe), recipe, Geometry(world.size, 1, 1, 1), world)
    sharing = SequenceRanks.join(world, world.size)
    ids = torch.randint(0, VOCABULARY, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    segment = Segment("text", 0, 0, tokens)
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.tensor([0, tokens], dtype=torch.int32), 0, [segment])
    engine.set_rates(1.0)
    return lambda: step.take(engine, world, [batch], Signals(), sharing=sharing)


if __name__ == "__main__":
    main(sys.argv[1:])
