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
"""Log decay of a chunk down to which fp32 holds its centred factors, from e^-50 to e^50. (float64 holds any
chunk of 16, which decays by no more than e^(16 * LEAST_DECAY).)"""
GROUP_ROWS = 4096
"""Chunks are worked on so many rows (tokens times heads) at a time, which keeps them in a CPU's cache."""
GROUP_ROWS_GPU = 2**17
CHUNK_GPU = 64
"""Tokens in a chunk on a GPU, where launches cost more than products."""
LEAST_DECAY_GPU = -20.0
"""e^-20 is 2e-9, below rounding in fp32, and float64 holds the factors of any chunk, from e^-640 to e^640."""


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


def choose_chunks(g: Tensor, sizes: Sequence[int], lengths: Sequence[int]) -> tuple[ChunkLayout, Tensor]:
    """Choose the longest chunks of `sizes` whose log decays `g` `[B, T, ...]` fp32 can factor.

    Returns the layout and g; where even the shortest chunks decay too much g is float64, and the operator has
    to compute so. On a GPU it always is: to look would make the host wait.
    """
    tokens, device = g.shape[1], g.device
    if device.type == "cuda":
        return ChunkLayout.of(tokens, CHUNK_GPU, lengths, device), g.double().clamp(min=LEAST_DECAY_GPU)
    for size in sizes:
        layout = ChunkLayout.of(tokens, size, lengths, device)
        if float(layout.split(g.detach()).sum(2).min()) >= MOST_DECAY:
            return layout, g
    return layout, g.clamp(min=LEAST_DECAY).double()


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


def walk(
    starts: Sequence[bool],
    states: Tensor,
    decay: Tensor,
    added: Tensor | None,
    reads: Tensor | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    inverse: Tensor | None = None,
) -> None:
    """Take the first of `states` `[n + 1, X, K, V]` through n chunks, in three launches each (see `folded`):

        U = inverse (reads + left M);  M <- decay M + added + right^T U

    Fills in the other states, and U in place of `reads` `[n, X, L, V]` (None: there is no U). Chunks that are
    `starts` begin with zero.
    """
    given = decay, added, reads, left, right, inverse
    for fresh, before, after, d, a, u, l, r, i in _by_chunk(starts, states, *given):
        if fresh:
            before.zero_()
        if a is None:
            torch.mul(d, before, out=after)
        else:
            torch.addcmul(a, d, before, out=after)
        if i is not None:
            torch.bmm(i, torch.baddbmm(u, l, before), out=u)
        elif u is not None:
            u.baddbmm_(l, before)
        if u is not None:
            after.baddbmm_(r.mT, u)


def walk_back(
    starts: Sequence[bool],
    d_states: Tensor,
    decay: Tensor,
    d_reads: Tensor | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    inverse: Tensor | None = None,
) -> None:
    """Complete the gradients of all states, from what the outputs give them and the last of `d_states`; those
    that the outputs give U, `d_reads`, become those of `reads`. Both in place."""
    chunks = _by_chunk(starts, d_states, decay, d_reads, left, right, inverse)
    for fresh, before, after, d, u, l, r, i in reversed(chunks):
        before.addcmul_(d, after)
        if u is not None:
            u.baddbmm_(r, after)
            if i is not None:
                u.copy_(i.mT @ u)
            before.baddbmm_(l.mT, u)
        if fresh:
            before.zero_()


def _by_chunk(starts: Sequence[bool], states: Tensor, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """Give for every chunk whether it is a start, the states before and after it, and its entries."""
    every = states.unbind()
    each = ([None] * len(starts) if x is None else x.unbind() for x in tensors)
    return list(zip(starts, every[:-1], every[1:], *each, strict=True))


def add_products(total: Tensor, a: Tensor, b: Tensor, factor: float = 1) -> Tensor:
    """Add `factor * a @ b` to `total` in place, for `[n, X, ...]`."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=factor)
    return total


def folded(inverse: Tensor, *rows: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Apply the inverse to rows of all chunks at once on a GPU: a launch less in each chunk, for a product
    more. Gives what is left of it for the walk, and the rows."""
    return (None, [inverse @ x for x in rows]) if inverse.is_cuda else (inverse, list(rows))


def product(a: Tensor, b: Tensor, into: Tensor) -> None:
    """Write `a @ b`, for `[n, X, ...]`, straight into its place."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=into.flatten(0, 1))


class Recurrence(NamedTuple):
    """A recurrence over chunks, worked on a group of n chunks at a time, forward and backward.

    Both functions take the operands `[n, B, L, ...]` of a group, and `starts`: which of its chunks begin with
    a zero state.
    """

    forward: Callable[[list[Tensor], Tensor, Sequence[bool], Tensor], None]
    """(operands; the state before the first chunk, and places for those after each; starts; place for the
    outputs)."""
    backward: Callable[[list[Tensor], Tensor, Tensor, Sequence[bool], list[Tensor]], None]
    """(operands, the outputs where they are kept, and their gradient; states as in `forward`; places for
    their gradients, with that of the last one; starts; places for the operands' gradients)."""
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
        states[0] = state
        with full_precision(state):
            for span in groups(out):
                around = states[span.start : span.stop + 1]
                rule.forward([x[span] for x in operands], around, starts[span], out[span])
        ctx.save_for_backward(states, *operands, *([out] if rule.keeps_outputs else []))
        ctx.rule, ctx.starts = rule, starts
        return out, states[-1].clone()

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
                d_states = torch.empty_like(around)
                d_states[-1] = d_state
                ctx.rule.backward(own, around, d_states, ctx.starts[span], into)
                d_state = d_states[0]
        return None, None, d_state, *grads
