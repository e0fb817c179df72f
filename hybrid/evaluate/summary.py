"""The short table at the end of training: scores beside the yardsticks, costs, and where to look next."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.errors import UserError, words
from hybrid.recipe import Recipe
from hybrid.text import columns

from .yardsticks import Say, Yardsticks, measure

if TYPE_CHECKING:
    from hybrid.train import Summary

SAMPLE_LINES = 12
LINE_WIDTH = 100


def report(recipe: Recipe, summary: Summary, say: Say = print) -> str:
    """Write the table. With `train.yardsticks` reads the data folder, where they are kept once computed, and
    tells `say` what is being done; what cannot be measured is left out, which is said."""
    lines = ["", *_costs(summary)]
    if not math.isnan(summary.bits_per_byte):  # some text is held out
        yardsticks = None
        if recipe.train.yardsticks:
            try:
                yardsticks = measure(recipe.data, recipe.train.eval_tokens, say)
            except (UserError, OSError) as error:  # the run is whole, whatever comes of these
                say(f"no yardsticks: {words(error)}")
        lines = ["", _scores(summary, yardsticks), *lines]
    for number, sample in enumerate(summary.samples, 1):
        lines += ["", f"sample {number}", *_excerpt(sample)]
    lines += ["", f"run directory     {summary.run}"]
    if recipe.monitor.tensorboard:
        lines.append(f"training curves   {tensorboard_command(summary.run)}")
    return "\n".join(lines)


def _scores(summary: Summary, yardsticks: Yardsticks | None) -> str:
    before = ["  before training", f"{summary.bits_per_byte_before:.3f}", ""]
    if not summary.same_text:
        before[1:] = ["-", "left out: its held-out text was another one, or is not known"]
    rows = [
        ["held-out text", "bits per byte", ""],
        before,
        [f"  after step {summary.steps:,}", f"{summary.bits_per_byte:.3f}", ""],
    ]
    if yardsticks is None:
        return columns(rows, left={0, 2})
    rows[0][0] = f"{yardsticks.bytes:,} held-out bytes ({yardsticks.tokens:,} tokens)"
    for name, bits in (
        (f"token bigram (m = {yardsticks.strength})", yardsticks.bigram),
        ("xz -9e", yardsticks.xz),
    ):
        gain = 100 * (1 - summary.bits_per_byte / bits)
        note = f"the model needs {abs(gain):.1f} % {'less' if gain >= 0 else 'more'}"
        rows.append([f"  {name}", f"{bits:.3f}", note])
    return columns(rows, left={0, 2})


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


def _excerpt(text: str) -> list[str]:
    """Take the first lines of a sample, indented, long ones shortened; nothing in them moves the cursor."""
    lines = ["".join(map(_visible, line)) for line in text.expandtabs(4).splitlines()]
    shown = [line if len(line) <= LINE_WIDTH else line[: LINE_WIDTH - 1] + "…" for line in lines]
    shown = shown[:SAMPLE_LINES]
    if len(lines) > SAMPLE_LINES:
        shown.append("…")
    return [f"  | {line}".rstrip() for line in shown]


def _visible(character: str) -> str:
    return character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"


def tensorboard_command(run: Path) -> str:
    """Write the shell command that shows the run's curves, with this Python environment's TensorBoard."""
    program, shown = Path(sys.executable).with_name("tensorboard"), "tensorboard"
    if program.exists():
        relative = os.path.relpath(program)
        shown = str(program) if relative.startswith(os.pardir) else relative
    return f"{shlex.quote(shown)} --logdir {shlex.quote(str(run / 'tensorboard'))}"
