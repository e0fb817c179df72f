"""Token shift: each vector is mixed with the one before it, feature by feature."""

from __future__ import annotations

import torch
from torch import Tensor

FALLBACKS = ("first", "zero")


def token_shift(
    x: Tensor, mix: Tensor, last: Tensor | None = None, fallback: str = "first", lengths: tuple[int, ...] = ()
) -> Tensor:
    """`x_t + mix * (x_{t-1} - x_t)`.

    Args:
        x: `[B, T, C]`.
        mix: `[C]`, 0 keeps the token, 1 takes the one before.
        last, fallback, lengths: as in `previous`.
    """
    return torch.lerp(x, previous(x, last, fallback, lengths), mix.to(x.dtype))


def previous(
    x: Tensor, last: Tensor | None = None, fallback: str = "first", lengths: tuple[int, ...] = ()
) -> Tensor:
    """`x_{t-1}` for every t.

    Args:
        x: `[B, T, C]`.
        last: the vector before the first one, `[B, C]`, carried from the previous call; None at the start.
        fallback: what stands before the first vector of a sequence: "first" (itself, so no shift) or "zero".
        lengths: of packed documents; `last` stands before the first one, each other starts anew.
    """
    assert fallback in FALLBACKS
    if last is not None:
        first = last[:, None].to(x.dtype)
    else:
        first = x[:, :1] if fallback == "first" else torch.zeros_like(x[:, :1])
    before = torch.cat((first, x[:, :-1]), 1)
    if len(lengths) > 1:
        starts = torch.tensor(lengths[:-1], device=x.device).cumsum(0)
        own = x[:, starts] if fallback == "first" else torch.zeros_like(x[:, starts])
        before = before.index_copy(1, starts, own)
    return before


def last_token(x: Tensor) -> Tensor:
    """The vector to carry into the next call: `[B, C]`, a copy that does not keep `x` alive."""
    return x[:, -1].clone()


def shift_ramp(mix: Tensor, power: float) -> None:
    """Fill `mix` `[C]` with `1 - (i / C)^power`, the paper's initial mix (its power falls with depth)."""
    i = torch.arange(mix.numel(), dtype=mix.dtype, device=mix.device)
    mix.copy_(1 - (i / mix.numel()) ** power)
