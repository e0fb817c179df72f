"""Plots of time against length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


class Curve(NamedTuple):
    """Values over lengths in tokens."""

    name: str
    lengths: Sequence[int]
    values: Sequence[float]
    dashed: bool = False
    """In the colour of the curve before."""


def time_plot(path: Path, title: str, unit: str, curves: Sequence[Curve]) -> None:
    """Draw curves over the number of tokens, both axes logarithmic, as a PNG."""
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    colour = None
    for curve in curves:
        style = {"linestyle": "--", "color": colour, "linewidth": 1} if curve.dashed else {"marker": "o"}
        (line,) = axes.plot(curve.lengths, curve.values, label=curve.name, **style)
        colour = line.get_color()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({length for curve in curves for length in curve.lengths})
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axes.set(xlabel="tokens", ylabel=unit, title=title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
