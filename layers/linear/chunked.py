"""Recurrences in chunks: how sequences lie in chunks, decays inside a chunk, and the walk over chunks.

In the chunk layout the chunk axis comes first, `[N, B, L, H, ...]`: N chunks of L tokens, so that what one
step of the recurrence reads lies together. Tokens missing in a last chunk are zero. Each packed document has
whole chunks of its own; the recurrence starts anew at each one's first chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends import full_precision
from ..indices import kept, offsets, on_device

LEAST_DECAY = -40.0
"""Log decays are raised to this: e^-40 is 4e-18, below rounding of anything it multiplies."""
MOST_DECAY = -100.0
"""Log decay of a chunk down to which fp32 holds its centred factors, from e^-50 to e^50."""
GROUP_ROWS = 4096
"""Chunks are worked on so many rows (tokens times heads) at a time, which keeps them in a CPU's cache."""
GROUP_ROWS_GPU = 2**17
CHUNK_GPU = 64
"""Tokens in a chunk on a GPU, where launches cost more than products."""


@dataclass(frozen=True)
class ChunkLayout:
    """How `tokens` tokens lie in `count` chunks of `size`."""

    tokens: int
    size: int
    count: int
    starts: tuple[bool, ...]  # per chunk: whether a document begins with it, so that the state is zero
    places: Tensor | None = None  # packed: `[T]`, place in the chunk layout of every token

    @classmethod
    def of(cls, tokens: int, size: int, lengths: Sequence[int], device: torch.device) -> ChunkLayout:
        """Lay out equal rows of `tokens`, or one row of documents of `lengths`, in chunks of at most
        `size`."""
        size = min(size, max(lengths, default=tokens))
        if len(lengths) < 2:
            count = -(-tokens // size)
            return cls(tokens, size, count, (False,) * count)
        return _packed(tuple(lengths), size, device)

    def split(self, x: Tensor) -> Tensor:
        """Take `[B, T, ...]` to `[N, B, L, ...]`."""
        if self.places is not None:
            room = x.new_zeros(self.count * self.size, *x.shape[2:])
            return room.index_copy(0, self.places, x[0]).unflatten(0, (self.count, 1, self.size))
        missing = self.count * self.size - self.tokens
        if missing:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
        return x.unflatten(1, (self.count, self.size)).transpose(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Take `[N, B, L, ...]` back to `[B, T, ...]`."""
        if self.places is not None:
            return x.flatten(0, 2).index_select(0, self.places)[None]
        return x.transpose(0, 1).flatten(1, 2)[:, : self.tokens]


@kept
def _packed(lengths: tuple[int, ...], size: int, device: torch.device) -> ChunkLayout:
    counts = [-(-length // size) for length in lengths]
    first = {0, *accumulate(counts)}
    starts = tuple(chunk in first for chunk in range(sum(counts)))
    places = on_device(offsets(lengths, [count * size for count in counts]), device)
    return ChunkLayout(sum(lengths), size, len(starts), starts, places)


def running_decay(g: Tensor, axis: int) -> Tensor:
    """Sum up log decays along `axis`, the tokens of a chunk, in float64: after fast decays fp32 sums
    would cancel. The sum stays above LEAST_DECAY times the tokens."""
    return g.double().clamp(min=LEAST_DECAY).cumsum(axis)


def choose_chunks(g: Tensor, sizes: Sequence[int], lengths: Sequence[int]) -> tuple[ChunkLayout, bool]:
    """Choose the longest chunks of `sizes` whose log decays `g` `[B, T, ...]` fp32 can factor about their
    middle, and tell whether it can. On a GPU nobody looks, as the host would wait."""
    tokens, device = g.shape[1], g.device
    if device.type == "cuda":
        return ChunkLayout.of(tokens, CHUNK_GPU, lengths, device), False
    for size in sizes:
        layout = ChunkLayout.of(tokens, size, lengths, device)
        if float(layout.split(g.detach()).sum(2).min()) >= MOST_DECAY:
            return layout, True
    return layout, False


def centred_growth(g: Tensor) -> Tensor:
    """Compute `e^(c - m)` for log decays `[..., L, D]`, c being their running sum and m half of the total, so
    that neither this nor its inverse overflows. One product gives the exponents."""
    half = g.new_full((g.shape[-2], g.shape[-2]), 0.5)
    return ((half.tril() - half.triu(1)) @ g).exp_()


def groups(like: Tensor) -> Iterator[slice]:
    """Give the groups of chunks of `like` `[N, B, L, H, ...]` that are worked on together."""
    count, batch, size, heads = like.shape[:4]
    rows = GROUP_ROWS_GPU if like.is_cuda else GROUP_ROWS
    step = max(1, rows // (batch * size * heads))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def by_chunk(starts: Sequence[bool], *tensors: Tensor) -> list[tuple[bool, tuple[Tensor, ...]]]:
    """Give for every chunk whether it is a start, and its entry of each tensor."""
    return list(zip(starts, zip(*(x.unbind() for x in tensors), strict=True), strict=True))


def add_products(total: Tensor, a: Tensor, b: Tensor, factor: float = 1) -> Tensor:
    """Add `factor * a @ b` to `total` in place, for `[n, X, ...]`."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=factor)
    return total


class Recurrence(NamedTuple):
    """A recurrence over chunks of centred decays, worked on a group of n chunks at a time, forward and
    backward: the fastest on a CPU. For other decays and GPUs see `levels`.

    Both functions take the operands `[n, B, L, ...]` of a group, and `starts`: which of its chunks begin with
    a zero state.
    """

    forward: Callable[[list[Tensor], Tensor, Tensor, Sequence[bool], Tensor], Tensor]
    """(operands, places for the state before each chunk, state before the first, starts, place for the
    outputs) -> state after the last."""
    backward: Callable[[list[Tensor], Tensor, Tensor, Sequence[bool], list[Tensor]], Tensor]
    """(operands, the outputs where they are kept, and their gradient; state before each chunk and after the
    last; gradient of that last one; starts; places for the operands' gradients) -> gradient of the state
    before the first."""
    value: int
    """Index of the operand that has the shape of the outputs."""
    keeps_outputs: bool = False
    """Whether the backward pass needs them."""

    def run(self, starts: Sequence[bool], state: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run over all chunks of operands `[N, B, L, ...]`; give the outputs and the state after the last
        chunk."""
        return _Run.apply(self, starts, state, *operands)


class _Run(torch.autograd.Function):
    """`Recurrence.run`; keeps for the backward the operands and the state before every chunk."""

    @staticmethod
    def forward(
        ctx: Any, rule: Recurrence, starts: Sequence[bool], state: Tensor, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(operands[rule.value], memory_format=torch.contiguous_format)
        states = state.new_empty(len(out) + 1, *state.shape)
        with full_precision(state):
            for span in groups(out):
                own = [x[span] for x in operands]
                state = rule.forward(own, states[span], state, starts[span], out[span])
        states[-1] = state
        ctx.save_for_backward(states, *operands, *([out] if rule.keeps_outputs else []))
        ctx.rule, ctx.starts = rule, starts
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        states, *kept = ctx.saved_tensors
        operands = kept[:-1] if ctx.rule.keeps_outputs else kept
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands]
        with torch.autocast(grad.device.type, enabled=False), full_precision(grad):
            for span in reversed(list(groups(grad))):
                own, into = [x[span] for x in (*kept, grad)], [x[span] for x in grads]
                around = states[span.start : span.stop + 1]
                d_state = ctx.rule.backward(own, around, d_state, ctx.starts[span], into)
        return None, None, d_state, *grads
