"""Sequences cut into chunks of equal length, and their decays.

In the chunk layout the chunk axis comes first, `[N, B, L, ...]`: N chunks of L tokens, so that what one step
of the recurrence reads lies together. Tokens missing in a last chunk are zero. Packed documents are cut one
by one, each to whole chunks; the recurrence starts anew at each one's first chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """How `tokens` tokens lie in `count` chunks of `size`."""

    tokens: int
    size: int
    count: int
    starts: tuple[bool, ...]  # per chunk: whether a document begins with it, so that the state is zero
    places: Tensor | None = None  # packed: `[T]`, place in the chunk layout of every token

    @classmethod
    def of(cls, tokens: int, size: int, lengths: Sequence[int], device: torch.device) -> Cut:
        """For equal rows of `tokens`, or one row of documents of `lengths`; chunks of at most `size`."""
        size = min(size, max(lengths, default=tokens))
        if len(lengths) < 2:
            count = -(-tokens // size)
            return cls(tokens, size, count, (False,) * count)
        counts = torch.tensor([-(-length // size) for length in lengths])
        sizes = torch.tensor(lengths)
        first = counts.cumsum(0) - counts
        gaps = first * size - (sizes.cumsum(0) - sizes)
        places = (torch.arange(tokens) + gaps.repeat_interleave(sizes)).to(device)
        starts = [False] * int(counts.sum())
        for chunk in first.tolist():
            starts[chunk] = True
        return cls(tokens, size, len(starts), tuple(starts), places)

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` to `[N, B, L, ...]`."""
        if self.places is not None:
            room = x.new_zeros(self.count * self.size, *x.shape[2:])
            return room.index_copy(0, self.places, x[0]).unflatten(0, (self.count, 1, self.size))
        missing = self.count * self.size - self.tokens
        if missing:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
        return x.unflatten(1, (self.count, self.size)).transpose(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """`[N, B, L, ...]` to `[B, T, ...]`."""
        if self.places is not None:
            return x.flatten(0, 2).index_select(0, self.places)[None]
        return x.transpose(0, 1).flatten(1, 2)[:, : self.tokens]


LEAST_DECAY = -40.0
"""Log decays are raised to this: e^-40 is 4e-18, below rounding of anything it multiplies."""


def running_decay(g: Tensor, axis: int) -> Tensor:
    """Running sum of log decays along `axis`, the tokens of a chunk, in float64: after fast decays fp32 sums
    would cancel. It stays above LEAST_DECAY times the tokens."""
    return g.double().clamp(min=LEAST_DECAY).cumsum(axis)


MOST_DECAY = -100.0
"""Log decay of a chunk down to which fp32 holds its centred factors, from e^-50 to e^50. (float64 holds any
chunk of 16, which decays by no more than e^(16 * LEAST_DECAY).)"""


def bounded(g: Tensor, sizes: Sequence[int], lengths: Sequence[int]) -> tuple[Cut, Tensor]:
    """A cut into the longest chunks of `sizes` whose log decays `g` `[B, T, ...]` fp32 can factor, and g.
    Where even the shortest decay too much, g is float64, and the operator has to compute so."""
    for size in sizes:
        cut = Cut.of(g.shape[1], size, lengths, g.device)
        if float(cut.split(g.detach()).sum(2).min()) >= MOST_DECAY:
            return cut, g
    return cut, g.clamp(min=LEAST_DECAY).double()


def centred_growth(g: Tensor) -> Tensor:
    """`e^(c - m)` for log decays `[..., L, D]`, c being their running sum and m half of the total, so that
    neither this nor its inverse overflows. One product gives the exponents."""
    half = g.new_full((g.shape[-2], g.shape[-2]), 0.5)
    return ((half.tril() - half.triu(1)) @ g).exp_()
