"""`hybrid bench scale`: two processes against one, and what the training loop adds to the engine's work."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import scale_work as work
from .crossing import compare
from .ranks import Ranks
from .report import BenchError, Row, columns, duration, environment, keep, rows_table
from .scale_work import QUICK, Sizes
from .sequence import against_one_rank
from .timing import alternate


def bench_scale(output: str | None, only: Sequence[str] = (), quick: bool = False) -> int:
    """Print every section's numbers; keep them in `output`/scale.json; returns the exit code."""
    unknown = sorted(set(only) - set(SECTIONS))
    if unknown:
        raise BenchError(f"bench scale has no part '{unknown[0]}'; its parts: {', '.join(SECTIONS)}")
    sizes = QUICK if quick else Sizes()
    rows: list[Row] = []
    for name, section in SECTIONS.items():
        if only and name not in only:
            continue
        found = section(sizes)
        rows += found["rows"]
        if output:
            keep(Path(output) / "scale.json", {name: {"environment": environment(), **found}})
    print(rows_table(rows))
    if quick:
        print("(tiny sizes: the targets do not apply)")
    return 0


def processes(sizes: Sizes) -> dict[str, Any]:
    """Two processes of one thread against one, the same batch, at every ZeRO stage."""
    tokens = sizes.batch * sizes.context
    seconds: dict[str, dict[str, float]] = {}
    with Ranks(1) as one, Ranks(2) as two:
        for stage in (1, 2, 3):
            for ranks in (one, two):
                ranks.call(work.open_engine, sizes, stage)
            runs = {"1": lambda: one.call(work.take_step), "2": lambda: two.call(work.take_step)}
            seconds[f"ZeRO {stage}"] = alternate(runs, rounds=sizes.rounds)
    table = [["", "1 process", "2 processes", "", "tokens/s"]]
    for name, found in seconds.items():
        ratio = f"{found['1'] / found['2']:.2f}x"
        table.append([name, duration(found["1"]), duration(found["2"]), ratio, f"{tokens / found['2']:,.0f}"])
    print(
        f"A step of {sizes.batch} x {sizes.context} tokens, one thread a process\n" + columns(table, left={0})
    )
    first = seconds["ZeRO 1"]
    row = Row("2 processes, ZeRO 1", "1 process, same batch", first["1"] / first["2"], 1.7, ideal=2.0)
    return {"rows": [row], "seconds": seconds, "tokens": tokens}


def loop(sizes: Sizes) -> dict[str, Any]:
    """The training loop with its data, logging, statistics and checkpoints against DeepSpeed's bare step."""
    with tempfile.TemporaryDirectory() as folder, Ranks(1) as one:
        (found,) = one.call(work.loop, sizes, folder)
    outside = found["step"] - found["engine"] + found["statistics"]
    parts = [[name, duration(value)] for name, value in found.items()]
    print("A step of the loop, and in it\n" + columns(parts, left={0}))
    rows = [
        Row(
            "the loop around the engine",
            "the engine's step",
            100 * outside / found["engine"],
            2,
            False,
            unit=" %",
        ),
        Row("waiting for data", "a step", 100 * found["data"] / found["step"], 1, False, unit=" %"),
        Row("stall of a checkpoint", "a step", found["stall"] / found["step"], 1, False),
    ]
    return {"rows": rows, "seconds": found}


def sequence(sizes: Sizes) -> dict[str, Any]:
    """One long sequence cut over two ranks of one thread, against one such rank."""
    return against_one_rank(sizes.long)


def crossing(sizes: Sizes) -> dict[str, Any]:
    """Both ways of a KVM layer to work on one sequence cut over ranks."""
    return compare(sizes.crossing)


SECTIONS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "processes": processes,
    "loop": loop,
    "sequence": sequence,
    "crossing": crossing,
}
