"""Every kind of layer in fp32 with one sequence, and the linear recurrences against loops over tokens:

python -m benchmarks.mixers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.layers import Context, LayerError, Mixer, Site, kinds
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.linear.rwkv7_op import rwkv7_recurrence
from hybrid.layers.linear.ssd import ssd
from hybrid.text import columns, duration
from tests.parity.linear_reference import delta_steps, ssd_steps
from tests.parity.rwkv7_reference import recurrence

from .command import Row, begin, make_parser, output_file, run_sections
from .measure import Run, alternate
from .plot import Curve, time_plot


@dataclass(frozen=True)
class Sizes:
    heads: int = 8
    head_dim: int = 64
    tokens: int = 4096
    """Of the comparison with step loops."""
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    decoded: int = 64
    rounds: int = 3

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


QUICK = Sizes(heads=2, head_dim=8, tokens=32, lengths=(32, 64), decoded=2)

OPTIONS: dict[str, dict[str, Any]] = {"mamba2": {"expand": 1, "state_size": 64}}
"""What a kind needs to have the common number of heads."""


class Twin(NamedTuple):
    """An operator and its loop over tokens; both return the output and the state."""

    operator: Callable[..., Any]
    steps: Callable[..., Any]
    inputs: Callable[[Sizes], list[Tensor]]
    target: float


def _draw(sizes: Sizes, *more: int) -> Tensor:
    return torch.randn(1, sizes.tokens, *(more or (sizes.heads, sizes.head_dim)))


def _unit(sizes: Sizes) -> Tensor:
    return F.normalize(_draw(sizes), dim=-1)


def _rwkv7(sizes: Sizes) -> list[Tensor]:
    kappa, rate = _unit(sizes), torch.sigmoid(_draw(sizes))
    log_decay = -torch.exp(-F.softplus(_draw(sizes)) - 0.5)
    return [_draw(sizes), log_decay, _draw(sizes), _draw(sizes), -kappa, kappa * rate]


def _delta(sizes: Sizes, channels: bool) -> list[Tensor]:
    g = -F.softplus(_draw(sizes) if channels else _draw(sizes, sizes.heads))
    beta = torch.sigmoid(_draw(sizes, sizes.heads))
    return [_unit(sizes), _unit(sizes), _draw(sizes), g, beta]


def _mamba2(sizes: Sizes) -> list[Tensor]:
    b, c = (_draw(sizes, 1, sizes.head_dim) for _ in range(2))
    return [_draw(sizes), b, c, -F.softplus(_draw(sizes, sizes.heads))]


TWINS: dict[str, Twin] = {
    "rwkv7": Twin(rwkv7_recurrence, recurrence, _rwkv7, 10),
    "kimi_delta": Twin(gated_delta_rule, delta_steps, lambda s: _delta(s, True), 10),
    "gated_deltanet": Twin(gated_delta_rule, delta_steps, lambda s: _delta(s, False), 15),
    "mamba2": Twin(ssd, ssd_steps, _mamba2, 15),
}
"""The operators whose speed has a target, by the kind of layer that uses them."""


def build(kind: str, sizes: Sizes) -> Mixer:
    """Make a layer with the common number of heads, or with its default options if it has no such thing."""
    cls = kinds()[kind]
    names = {field.name for field in dataclasses.fields(cls.Options)}
    wanted = {"num_heads": sizes.heads, "head_dim": sizes.head_dim}
    given = {name: value for name, value in wanted.items() if name in names}
    torch.manual_seed(0)
    try:
        return cls(cls.Options(**given, **OPTIONS.get(kind, {})), Site(sizes.hidden))
    except LayerError:
        return cls(cls.Options(), Site(sizes.hidden))


def layer_training(layer: Mixer, tokens: int) -> Run:
    """Forward and backward of a layer, with gradients of its input and parameters."""
    x = torch.randn(1, tokens, layer.site.hidden_size, requires_grad=True)
    leaves, grad = [x, *layer.parameters()], torch.randn_like(x)

    def run() -> None:
        y, _ = layer(x, Context.of(x, want_state=False))
        torch.autograd.grad(y, leaves, grad, allow_unused=True)

    return run


@torch.no_grad()
def layer_decoding(layer: Mixer, position: int, tokens: int) -> Run:
    """Decode `tokens` tokens from `position` on, each run from where the last one ended."""
    x = torch.randn(1, position, layer.site.hidden_size)
    state: Any = None
    for part in x.split(2048, 1):
        _, state = layer(part, Context.of(part), state)

    @torch.no_grad()
    def run() -> None:
        nonlocal state
        for token in x[:, :tokens].split(1, 1):
            _, state = layer(token, Context.of(token), state)

    return run


def operator_training(operator: Callable[..., Any], leaves: Sequence[Tensor]) -> Run:
    """Forward and backward of an operator or of its loop over tokens."""
    grad = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(operator(*leaves)[0], leaves, grad)


def against_steps(kind: str, sizes: Sizes) -> tuple[Row, dict[str, float]]:
    """Measure the operator's forward and backward against its loop's."""
    twin = TWINS[kind]
    torch.manual_seed(0)
    leaves = [x.detach().requires_grad_() for x in twin.inputs(sizes)]
    runs = {name: operator_training(getattr(twin, name), leaves) for name in ("operator", "steps")}
    times = alternate(runs, rounds=sizes.rounds)
    work = f"{kind} operator, forward+backward, {sizes.tokens} tokens"
    return Row(work, "token by token", times["steps"] / times["operator"], twin.target), times


def measure(kind: str, sizes: Sizes) -> dict[str, Any]:
    """Measure training at every length and decoding after the longest but one; count FLOPs and state."""
    layer = build(kind, sizes)
    times = alternate({str(n): layer_training(layer, n) for n in sizes.lengths}, rounds=sizes.rounds)
    short, long = sizes.lengths[0], sizes.lengths[-1]
    growth = times[str(long)] / long / (times[str(short)] / short)
    counted = layer.flops_per_token(long).training / layer.flops_per_token(short).training
    position = sizes.lengths[-2]
    decoding = alternate({"": layer_decoding(layer, position, sizes.decoded)}, rounds=sizes.rounds)[""]
    found = {
        "options": dataclasses.asdict(layer.options),
        "training_seconds": times,
        "growth_per_token": growth,
        "counted_growth": counted,
        "decode_position": position,
        "decode_seconds": decoding / sizes.decoded,
        "state_bytes": {str(n): layer.state_bytes(n) for n in sizes.lengths},
    }
    if kind in TWINS:
        row, found["operator_seconds"] = against_steps(kind, sizes)
        work = f"{kind} layer, forward+backward, time per token at {long}"
        found["rows"] = [row, Row(work, f"itself at {short}", growth, 1.3, at_least=False, ideal=counted)]
    return found


def kinds_table(found: dict[str, dict[str, Any]], sizes: Sizes) -> str:
    """Format what was measured of every kind."""
    short, long = sizes.lengths[0], sizes.lengths[-1]
    rows = [["kind", f"train {sizes.tokens}", "per token", f"{long}/{short}", "counted", "decode", "state"]]
    for kind, one in found.items():
        seconds = one["training_seconds"][str(sizes.tokens)]
        growth = [f"{one[name]:.2f}x" for name in ("growth_per_token", "counted_growth")]
        state = f"{one['state_bytes'][str(long)] / 2**20:.3g} MiB"
        times = [duration(seconds), duration(seconds / sizes.tokens)]
        rows.append([kind, *times, *growth, duration(one["decode_seconds"]), state])
    return columns(rows, left={0})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and keep mixers.json and mixers.png in the output folder."""
    sections = {kind: partial(measure, kind) for kind in kinds()}
    given = begin(make_parser(__doc__, sections), argv)
    sizes = QUICK if given.quick else Sizes()
    found = run_sections("mixers", sections, sizes, given)
    print(f"\nOne layer, {sizes.heads} heads of {sizes.head_dim}, fp32, forward+backward")
    print(kinds_table(found, sizes))
    if path := output_file(given, "mixers.png"):
        _plot(path, found, sizes)


def _plot(path: Path, found: dict[str, dict[str, Any]], sizes: Sizes) -> None:
    curves = [
        Curve(kind, sizes.lengths, [one["training_seconds"][str(n)] for n in sizes.lengths])
        for kind, one in found.items()
    ]
    title = f"One layer, forward + backward, {sizes.heads} heads of {sizes.head_dim}, fp32, CPU"
    time_plot(path, title, "seconds", curves)


if __name__ == "__main__":
    main()
