"""Recurrences over chunks of any decays, in few launches: the form for GPUs, and for decays that fp32 cannot
factor about a chunk's middle.

All that tokens of a chunk do to each other and to the state is computed for many chunks at once; the state
goes through the chunks in three launches each, forward and backward. `chunked` says how chunks lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends import full_precision
from ..indices import kept, on_device
from .chunked import LEAST_DECAY, centred_growth, groups


class Decays(NamedTuple):
    """Factors of the tokens of chunks, for log decays `[..., L, K]` with the running sum c.

    The decay e^(c_t - c_s) from token s to a later t is `left[t] * right[s]` of the one level whose `seen`
    is 1 for this pair, else 0.
    """

    left: Tensor  # [..., levels, L, K]
    right: Tensor  # [..., levels, L, K]
    seen: Tensor  # [levels, L, L]
    start: Tensor  # [..., L, K]: e^c, from before the chunk to the token
    end: Tensor  # [..., L, K]: e^(c_L - c), from the token to the chunk's end
    total: Tensor  # [..., 1, K]: e^c_L


def decays(g: Tensor, centred: bool) -> Decays:
    """Factor the decays of chunks: about the chunk's middle if that can be held; else level by level about
    borders between the tokens, such that every factor is at most 1 whatever the decays are."""
    size = g.shape[-2]
    if centred:
        seen = _causal(size, g.dtype, g.device)
        grow = centred_growth(g)
        half, shrink = grow[..., -1:, :], grow.reciprocal()
        left, right = grow.unsqueeze(-3), shrink.unsqueeze(-3)
        return Decays(left, right, seen[None], grow * half, shrink * half, half.square())
    sums, seen = _levels(size, g.dtype, g.device)
    found = (sums @ g.clamp(min=LEAST_DECAY)).exp().unflatten(-2, (-1, size))
    left, right, start, end = found.split((len(seen), len(seen), 1, 1), -3)
    return Decays(left, right, seen, start.squeeze(-3), end.squeeze(-3), start[..., 0, -1:, :])


@kept
def _causal(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=dtype, device=device).tril_()


@kept
def _levels(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the matrix that takes log decays `[L, K]` to the exponents of `Decays` (left, right, start, end),
    and `seen`: at each level blocks are halved, and tokens of the second half see those of the first; at
    the last one every token sees itself."""
    i = torch.arange(size)
    row, column = i[:, None], i
    left, right, seen = [torch.zeros(size, size)], [torch.zeros(size, size)], [torch.eye(size)]
    half = 1
    while half < size:
        border = row // (2 * half) * 2 * half + half
        later, earlier = row >= border, column < border
        left.append(later & (column >= border) & (column <= row))
        right.append(~later & (column > row) & (column < border))
        seen.append(later & earlier & (column >= border - half))
        half *= 2
    sums = torch.cat([x.to(dtype) for x in (*left, *right, column <= row, column > row)])
    return on_device(sums, device), on_device(torch.stack([x.to(dtype) for x in seen]), device)


class Steps(NamedTuple):
    """What a group's chunks do to the state M, one after the other, each tensor `[n, X, ...]`:

    `U = reads + left M;  M <- decay M + added + right^T U`, without U where `reads` is None.
    """

    decay: Tensor  # of a shape that is broadcast to M's
    added: Tensor | None  # like M; None: nothing
    reads: Tensor | None = None  # [n, X, L, V]
    left: Tensor | None = None  # [n, X, L, K]
    right: Tensor | None = None  # [n, X, L, K]

    def walk(self, starts: Sequence[bool], states: Tensor) -> None:
        """Take the first of `states` `[n + 1, X, K, V]` through the chunks: fill in the others, and U in
        place of `reads`. Chunks that are `starts` begin with zero."""
        for fresh, before, after, (decay, added, read, left, right) in self._by_chunk(starts, states):
            if fresh:
                before.zero_()
            if added is None:
                torch.mul(decay, before, out=after)
            else:
                torch.addcmul(added, decay, before, out=after)
            if read is not None:
                read.baddbmm_(left, before)
                after.baddbmm_(right.mT, read)

    def walk_back(self, starts: Sequence[bool], d_states: Tensor, d_reads: Tensor | None) -> None:
        """Complete the gradients of the states before all chunks, from what the outputs give them and the
        last of `d_states`, and those of U, both in place."""
        chunks = self._replace(added=None, reads=d_reads)._by_chunk(starts, d_states)
        for fresh, before, after, (decay, _, d_read, left, right) in reversed(chunks):
            before.addcmul_(decay, after)
            if d_read is not None:
                d_read.baddbmm_(right, after)
                before.baddbmm_(left.mT, d_read)
            if fresh:
                before.zero_()

    def _by_chunk(self, starts: Sequence[bool], states: Tensor) -> list[tuple[Any, ...]]:
        every = states.unbind()
        each = zip(*([None] * len(starts) if x is None else x.unbind() for x in self), strict=True)
        return list(zip(starts, every[:-1], every[1:], each, strict=True))


class LevelRecurrence(NamedTuple):
    """A recurrence over chunks, worked on a group of n chunks at a time; both functions are
    differentiable."""

    prepare: Callable[..., tuple[Steps, tuple[Tensor, ...]]]
    """Operands `[n, B, L, ...]` -> what they do to the state, and what `outputs` needs of them."""
    outputs: Callable[..., Tensor]
    """(those; state before each chunk `[n, X, ...]`; U) -> outputs `[n, X, L, ...]`."""
    value: int
    """Index of the operand that has the shape of the outputs."""

    def run(self, starts: Sequence[bool], state: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run over all chunks of operands `[N, B, L, ...]`; give the outputs and the state after the last
        chunk."""
        return _Run.apply(self, starts, state, *operands)


class _Run(torch.autograd.Function):
    """`LevelRecurrence.run`; keeps for the backward the operands and the state before every chunk, from which
    it computes a group at a time again."""

    @staticmethod
    def forward(
        ctx: Any, rule: LevelRecurrence, starts: Sequence[bool], state: Tensor, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(operands[rule.value], memory_format=torch.contiguous_format)
        states = state.new_empty(len(out) + 1, *state.shape)
        states[0] = state
        with full_precision(state):
            for span in groups(out):
                steps, kept = rule.prepare(*(x[span] for x in operands))
                around = states[span.start : span.stop + 1]
                steps.walk(starts[span], around)
                y = rule.outputs(*kept, around[:-1], steps.reads)
                _by_rows(out[span], y.shape[1]).copy_(y.unflatten(1, (out.shape[1], -1)))
        ctx.save_for_backward(states, *operands)
        ctx.rule, ctx.starts = rule, starts
        return out, states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        states, *operands = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands]
        with torch.autocast(grad.device.type, enabled=False), full_precision(grad):
            for span in reversed(list(groups(grad))):
                own = [x[span] for x in operands]
                found, d_state = _group_back(ctx, own, states[span], grad[span], d_state, ctx.starts[span])
                for place, one in zip(grads, found, strict=True):
                    place[span] = one
        return None, None, d_state, *grads


def _group_back(
    ctx: Any, operands: list[Tensor], states: Tensor, grad: Tensor, d_state: Tensor, starts: Sequence[bool]
) -> tuple[Sequence[Tensor], Tensor]:
    """Compute the gradients of a group's operands and of the state before it, from those of its outputs and
    of the state after it."""
    leaves, before = [x.detach().requires_grad_() for x in operands], states.detach().requires_grad_()
    with torch.enable_grad():
        steps, kept = ctx.rule.prepare(*leaves)
        reads = None
        if steps.reads is not None:
            assert steps.left is not None
            reads = (steps.reads.detach() + steps.left.detach() @ states).requires_grad_()
        held = [x.detach().requires_grad_() for x in kept]
        y = ctx.rule.outputs(*held, before, reads)
    wanted = [before, *held, *(() if reads is None else (reads,))]
    d_y = _by_rows(grad, y.shape[1]).flatten(1, 2)
    d_before, *d_held = torch.autograd.grad(y, wanted, d_y)
    d_reads = None if reads is None else d_held.pop()
    d_states = torch.cat((d_before, d_state[None]))
    steps.walk_back(starts, d_states, d_reads)
    d_after = d_states[1:]
    made: list[Any] = [steps.decay, *kept]
    d_made = [(states * d_after).sum_to_size(steps.decay.shape), *d_held]
    if steps.added is not None:
        made.append(steps.added)
        d_made.append(d_after)
    if reads is not None:
        assert d_reads is not None
        made += [steps.reads, steps.left, steps.right]
        d_made += [d_reads, d_reads @ states.mT, reads.detach() @ d_after.mT]
    return torch.autograd.grad(made, leaves, d_made), d_states[0]


def _by_rows(x: Tensor, rows: int) -> Tensor:
    """View `[n, B, L, H, V]` as `[n, B, X / B, L, W]`, for X `rows`."""
    return x.flatten(3).unflatten(3, (rows // x.shape[1], -1)).transpose(2, 3)


# What operators whose tokens also read the state are made of


def seen_products(rows: Sequence[Tensor], columns: Sequence[Tensor], decay: Decays) -> list[list[Tensor]]:
    """Multiply each of `rows` with each of `columns`, all `[..., L, K]`, and with the decays between them:
    scores `[..., L, L]`. The first of `rows` sees tokens up to its own, the others only earlier ones."""
    levels, size, _ = decay.seen.shape
    scalar = decay.total.shape[-1] == 1
    if scalar:
        between, rights = decay.left @ decay.right.mT, [column.mT for column in columns]
    else:
        between, rights = None, [(column.unsqueeze(-3) * decay.right).mT for column in columns]
    found = []
    for place, row in enumerate(rows):
        mask = _masks(levels, size, place == 0, row.dtype, row.device)
        if between is not None:
            factor = _over_levels(between * mask)
            found.append([row @ right * factor for right in rights])
        else:
            left = row.unsqueeze(-3) * decay.left
            found.append([_over_levels(left @ right * mask) for right in rights])
    return found


def _over_levels(x: Tensor) -> Tensor:
    return x.sum(-3) if x.shape[-3] > 1 else x.squeeze(-3)


@kept
def _masks(levels: int, size: int, own: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    seen = _levels(size, dtype, device)[1] if levels > 1 else _causal(size, dtype, device)[None]
    return seen if own else seen * (1 - torch.eye(size, dtype=dtype, device=device))


class _UnitInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        one = torch.eye(own.shape[-1], dtype=own.dtype, device=own.device).expand_as(own)
        inverse = torch.linalg.solve_triangular(-own, one, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return inverse.mT @ grad @ inverse.mT


def unit_inverse(own: Tensor) -> Tensor:
    """Compute `(I - own)^-1` for strictly lower triangular `[..., L, L]` (so is the part of its gradient that
    counts)."""
    return _UnitInverse.apply(own)


def outputs(start: Tensor, scores: Tensor, *rest: Tensor) -> Tensor:
    """Compute outputs `[n, X, L, V]` of what reads the state from a chunk's start `[n, X, L, K]` and of the
    scores of U (see `Steps`); `rest`: further outputs, if any; the states; U."""
    *own, states, reads = rest
    return sum(own, start @ states + scores @ reads)
