"""Token shift: each vector is mixed with the one before it, feature by feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .indices import ends, starts

FALLBACKS = ("first", "zero")


Last = Tensor | Sequence[Tensor | None] | None
"""What a call begins after, `[B, C]`, or None at the start; a list of these for a packed row's documents."""


def token_shift(
    x: Tensor, mix: Tensor, last: Last = None, fallback: str = "first", lengths: tuple[int, ...] = ()
) -> Tensor:
    """Compute `x_t + mix * (x_{t-1} - x_t)`.

    Args:
        x: `[B, T, C]`.
        mix: `[C]`, 0 keeps the token, 1 takes the one before.
        last, fallback, lengths: as in `previous`.
    """
    return torch.lerp(x, previous(x, last, fallback, lengths), mix.to(x.dtype))


def previous(x: Tensor, last: Last = None, fallback: str = "first", lengths: tuple[int, ...] = ()) -> Tensor:
    """Give `x_{t-1}` for every t.

    Args:
        x: `[B, T, C]`.
        last: the vector before the first one, carried from the previous call.
        fallback: what stands before the first vector of a sequence: "first" (itself, so no shift) or "zero".
        lengths: of packed documents; each starts anew, but for the first, which goes on from a tensor `last`,
            or for all those that a list gives one.
    """
    assert fallback in FALLBACKS
    if not lengths:
        assert last is None or isinstance(last, Tensor)
        first = _start(x[:, 0], last, fallback)
        return torch.cat((first[:, None], x[:, :-1]), 1)
    first = starts(lengths, x.device)
    own = _start(x[0].index_select(0, first), None, fallback)
    if isinstance(last, Tensor):
        last = [last, *[None] * (len(lengths) - 1)]
    if last is not None:
        pairs = zip(own.split(1), last, strict=True)
        own = torch.cat([start if carried is None else carried.to(x.dtype) for start, carried in pairs])
    if len(lengths) == x.shape[1]:
        return own[None]
    return torch.cat((x[:, :1], x[:, :-1]), 1).index_copy(1, first, own[None])


def _start(x: Tensor, last: Tensor | None, fallback: str) -> Tensor:
    """Give what stands before the vectors `x` `[N, C]` that begin a call."""
    if last is not None:
        return last.to(x.dtype)
    return x if fallback == "first" else torch.zeros_like(x)


def last_token(x: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
    """Take the vector to carry into the next call: `[B, C]`, a copy that does not keep `x` alive; for a
    packed row one per document, `[N, C]`."""
    if not lengths:
        return x[:, -1].clone()
    return x[0].index_select(0, ends(lengths, x.device))


def shift_ramp(mix: Tensor, power: float) -> None:
    """Fill `mix` `[C]` with `1 - (i / C)^power`, the paper's initial mix (its power falls with depth)."""
    i = torch.arange(mix.numel(), dtype=mix.dtype, device=mix.device)
    mix.copy_(1 - (i / mix.numel()) ** power)
