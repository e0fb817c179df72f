"""The short table at the end of training: what was reached, beside the yardsticks, and where to look next."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .yardsticks import Yardsticks, measure

if TYPE_CHECKING:
    from hybrid.recipe.schema import Recipe
    from hybrid.train import Summary

SAMPLE_LINES = 12
LINE_WIDTH = 100


def report(recipe: Recipe, summary: Summary) -> str:
    """The table as text. Reads the data folder for the yardsticks, which are kept there once computed."""
    lines = ["", *_costs(summary)]
    if not math.isnan(summary.bits_per_byte):  # some text is held out
        lines = ["", *_scores(summary, measure(recipe.data, recipe.train.eval_tokens)), *lines]
    for number, sample in enumerate(summary.samples, 1):
        lines += ["", f"sample {number}", *_cut(sample)]
    lines += ["", f"run directory     {summary.run}"]
    if recipe.monitor.tensorboard:
        lines.append(f"training curves   {tensorboard_command(summary.run)}")
    return "\n".join(lines)


def _scores(summary: Summary, yardsticks: Yardsticks) -> list[str]:
    after = summary.bits_per_byte
    rows = [
        ("before training", summary.bits_per_byte_before, ""),
        (f"after step {summary.steps:,}", after, ""),
        (f"token bigram (m = {yardsticks.strength})", yardsticks.bigram, _against(after, yardsticks.bigram)),
        ("xz -9e", yardsticks.xz, _against(after, yardsticks.xz)),
    ]
    title = f"{yardsticks.bytes:,} held-out bytes ({yardsticks.tokens:,} tokens)"
    return [f"{title:<44}bits per byte", *(f"  {name:<42}{bits:>13.3f}{note}" for name, bits, note in rows)]


def _against(bits: float, yardstick: float) -> str:
    gain = 100 * (1 - bits / yardstick)
    return f"   the model needs {abs(gain):.1f} % {'less' if gain >= 0 else 'more'}"


def _costs(summary: Summary) -> list[str]:
    speed = (
        f"{summary.tokens_per_second:,.0f} tokens/s" if summary.tokens_per_second else "no step left to take"
    )
    lines = [
        f"speed             {speed} ({summary.tokens:,} tokens trained on)",
        f"time              {summary.seconds:,.0f} s for this call",
        f"peak memory       {summary.peak_memory_bytes / 1e9:.2f} GB",
    ]
    if summary.skipped:
        lines.append(f"skipped steps     {summary.skipped}")
    return lines


def _cut(text: str) -> list[str]:
    """The first lines of a sample, indented, long ones shortened; nothing in them moves the cursor."""
    lines = ["".join(map(_visible, line)) for line in text.expandtabs(4).splitlines()]
    shown = [line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 1] + "…" for line in lines]
    shown = shown[:SAMPLE_LINES]
    if len(lines) > SAMPLE_LINES:
        shown.append("…")
    return [f"  | {line}".rstrip() for line in shown]


def _visible(character: str) -> str:
    return character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"


def tensorboard_command(run: Path) -> str:
    """The shell command that shows the run's curves, with the TensorBoard of this Python's environment."""
    program = Path(sys.executable).with_name("tensorboard")
    shown = _below_here(program) if program.exists() else "tensorboard"
    return f"{shlex.quote(shown)} --logdir {shlex.quote(str(run / 'tensorboard'))}"


def _below_here(program: Path) -> str:
    relative = os.path.relpath(program)
    return str(program) if relative.startswith(os.pardir) else relative
