"""Plots of time against length. matplotlib is needed only here."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .report import BenchError


class Curve(NamedTuple):
    name: str
    lengths: Sequence[int]
    values: Sequence[float]
    dashed: bool = False
    """In the colour of the curve before."""


def require_matplotlib() -> None:
    """BenchError where plots cannot be drawn."""
    if not importlib.util.find_spec("matplotlib"):
        raise BenchError("plots need matplotlib: pip install matplotlib, or give no --output")


def time_plot(path: Path, title: str, unit: str, curves: Sequence[Curve]) -> None:
    """Curves over the number of tokens, both axes logarithmic, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
