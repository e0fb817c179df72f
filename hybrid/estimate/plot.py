"""`hybrid info --plot`: the costs of each kind of layer in a recipe as the context grows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hybrid.errors import UserError
from hybrid.files import replacing
from hybrid.recipe import Recipe

from .info import meta_model
from .memory import element_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS = [2**power for power in range(8, 21)]
"""Tokens, 256 to about a million."""


class PlotError(UserError):
    """A plot that cannot be drawn here."""


class Curve(NamedTuple):
    """Costs of one layer of a letter, its state and prefill, at each of LENGTHS."""

    letter: str
    kind: str
    state_bytes: list[int]
    """Of one sequence, in the recipe's precision."""
    flops: list[float]
    """Forward, per token: the mean over a prompt of this length."""


def curves(recipe: Recipe) -> list[Curve]:
    """Compute a curve for every letter of the recipe's pattern, in order of first appearance."""
    model = meta_model(recipe)
    found: dict[str, Curve] = {}
    for spec, mixer in zip(model.layers, model.mixers, strict=True):
        if spec.letter not in found:
            state = [mixer.state_bytes(length, element_size(recipe)) for length in LENGTHS]
            flops = [mixer.flops_per_token(length).forward for length in LENGTHS]
            found[spec.letter] = Curve(spec.letter, spec.kind, state, flops)
    return list(found.values())


def draw(recipe: Recipe, path: str | Path) -> None:
    """Write two panels, state bytes and prefill FLOPs against the context's length.

    Raises:
        PlotError: matplotlib is missing, or the file's ending names no kind of image.
    """
    path = Path(path)
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PlotError(f"drawing {path.name} needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise PlotError(f"{path}: the name must end in .png (or .{', .'.join(sorted(known))})")
    left, right = figure.subplots(1, 2)
    for number, curve in enumerate(curves(recipe)):
        # dashes of different lengths, so that curves that coincide stay visible
        style: dict[str, Any] = {
            "label": f"{curve.letter}  {curve.kind}",
            "linewidth": 2,
            "dashes": (6, number % 4),
        }
        left.plot(LENGTHS, curve.state_bytes, **style)
        right.plot(LENGTHS, curve.flops, **style)
    _finish(left, f"State of one sequence and layer ({recipe.train.precision})", "bytes (k = 1024)", 1024)
    _finish(right, "Prefill, one layer without its feed-forward", "forward FLOPs per token", 1000)
    left.legend(fontsize=8)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))


def _finish(axes: Axes, title: str, unit: str, thousand: int) -> None:
    from matplotlib.ticker import FuncFormatter

    def short(number: float, _: int | None = None) -> str:
        prefixes = ["", "k", "M", "G", "T"]
        while number >= thousand and len(prefixes) > 1:
            number /= thousand
            prefixes.pop(0)
        return f"{number:g}{prefixes[0]}"

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if thousand == 1024 else 10)
    axes.set_xticks(LENGTHS[::2], [f"{n // 1024}k" if n >= 1024 else str(n) for n in LENGTHS[::2]])
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    axes.set(xlabel="context, tokens", ylabel=unit, title=title)
    axes.grid(True, which="major", alpha=0.3)
