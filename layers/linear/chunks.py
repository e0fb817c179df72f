"""Sequences cut into chunks of equal length, and the recurrence over chunks with its own backward.

In the chunk layout the chunk axis comes first, `[N, B, L, ...]`: N chunks of L tokens, so that what one step
of the recurrence reads lies together. Tokens missing in a last chunk are zero. Packed documents are cut one
by one, each to whole chunks; the recurrence starts anew at each one's first chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def delta_scan(
    u: Tensor, w: Tensor, k: Tensor, decay: Tensor, state: Tensor | None, starts: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """`R_n = U_n - W_n M_n;  M_{n+1} = decay_n M_n + K_n^T R_n` over chunks n.

    Args:
        u: `[N, ..., L, V]`.
        w, k: `[N, ..., L, K]`.
        decay: `[N, ..., K, 1]` or `[N, ..., 1, 1]`.
        state: M before the first chunk `[..., K, V]`; None: zero.
        starts: chunks that M is zero before.

    Returns:
        R `[N, ..., L, V]`, every chunk's M before it `[N, ..., K, V]`, and the M after the last.
    """
    lead = u.shape[1:-2]
    flat = [x.flatten(1, -3) for x in (u, w, k, decay)]
    if state is None:
        state = u.new_zeros(*lead, k.shape[-1], u.shape[-1])
    r, before, last = _DeltaScan.apply(*flat, state.flatten(0, -3), tuple(starts))
    return r.unflatten(1, lead), before.unflatten(1, lead), last.unflatten(0, lead)


class _DeltaScan(torch.autograd.Function):
    """Steps of two matrix products each; what autograd would keep of them is recomputed from R and M."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, w: Tensor, k: Tensor, decay: Tensor, state: Tensor, starts: tuple
    ) -> Any:
        r = torch.empty_like(u, memory_format=torch.contiguous_format)
        before = u.new_empty(len(starts), *state.shape)
        for n, fresh in enumerate(starts):
            if fresh:
                state = torch.zeros_like(state)
            before[n] = state
            torch.baddbmm(u[n], w[n], state, alpha=-1, out=r[n])
            state = torch.baddbmm(state * decay[n], k[n].mT, r[n])
        ctx.save_for_backward(w, k, decay, r, before)
        ctx.starts = starts
        return r, before, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        w, k, decay, r, before = ctx.saved_tensors
        grad_r, grad_before, grad = grads  # grad: of the state after the chunk at hand
        du, after = torch.empty_like(r), torch.empty_like(before)
        with torch.autocast(r.device.type, enabled=False):
            for n in reversed(range(len(ctx.starts))):
                after[n] = grad
                torch.baddbmm(grad_r[n], k[n], grad, out=du[n])
                grad = torch.baddbmm(grad * decay[n] + grad_before[n], w[n].mT, du[n], alpha=-1)
                if ctx.starts[n]:
                    grad = torch.zeros_like(grad)
            dw = -(du @ before.mT)
            dk = r @ after.mT
        return du, dw, dk, _decay_gradient(after, before, decay), grad, None


def decay_scan(
    added: Tensor, decay: Tensor, state: Tensor | None, starts: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """`M_{n+1} = decay_n M_n + added_n` over chunks n.

    Args:
        added: `[N, ..., K, V]`.
        decay: `[N, ..., K, 1]` or `[N, ..., 1, 1]`.
        state, starts: as in `delta_scan`.

    Returns:
        Every chunk's M before it `[N, ..., K, V]`, and the M after the last.
    """
    return _DecayScan.apply(
        added, decay, torch.zeros_like(added[0]) if state is None else state, tuple(starts)
    )


class _DecayScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, added: Tensor, decay: Tensor, state: Tensor, starts: tuple) -> Any:
        before = torch.empty_like(added, memory_format=torch.contiguous_format)
        for n, fresh in enumerate(starts):
            if fresh:
                state = torch.zeros_like(state)
            before[n] = state
            state = torch.addcmul(added[n], state, decay[n])
        ctx.save_for_backward(decay, before)
        ctx.starts = starts
        return before, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        decay, before = ctx.saved_tensors
        grad_before, grad = grads
        after = torch.empty_like(before)
        for n in reversed(range(len(ctx.starts))):
            after[n] = grad
            grad = torch.addcmul(grad_before[n], grad, decay[n])
            if ctx.starts[n]:
                grad = torch.zeros_like(grad)
        return after, _decay_gradient(after, before, decay), grad, None


def _decay_gradient(after: Tensor, before: Tensor, decay: Tensor) -> Tensor:
    """Of `decay`, from the gradients of the states after each chunk and the states before it."""
    axes = [axis for axis in (-2, -1) if decay.shape[axis] == 1]
    return (after * before).sum(axes, keepdim=True)
