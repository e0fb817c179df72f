"""A recurrence over chunks that is worked on a group of chunks at a time, forward and backward.

The layout is that of `chunks.py`: the chunk axis comes first, `[N, B, L, H, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

GROUP_ROWS = 4096
"""Chunks are worked on so many rows (tokens times heads) at a time, which keeps them in a CPU's cache."""
GROUP_ROWS_GPU = 2**18


def groups(like: Tensor) -> Iterator[slice]:
    """Chunks of `like` `[N, B, L, H, ...]` that are worked on together."""
    count, batch, size, heads = like.shape[:4]
    rows = GROUP_ROWS_GPU if like.is_cuda else GROUP_ROWS
    step = max(1, rows // (batch * size * heads))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def each(starts: Sequence[bool], *tensors: Tensor) -> list[tuple[bool, tuple[Tensor, ...]]]:
    """For every chunk whether it is a start, and its part of each tensor."""
    return list(zip(starts, zip(*(x.unbind() for x in tensors), strict=True), strict=True))


@contextmanager
def exact_products(like: Tensor) -> Iterator[None]:
    """No TF32, whose 10 bits centred factors do not bear."""
    if like.device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def add_products(total: Tensor, a: Tensor, b: Tensor, factor: float = 1) -> Tensor:
    """`total + factor * a @ b` for `[n, X, ...]`, in place."""
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=factor)
    return total


class Rule(NamedTuple):
    """A recurrence: what it does with n chunks. `starts`: which of them begin with a zero state.

    Both functions take the operands `[n, B, L, ...]` of the group.
    """

    forward: Callable[[list[Tensor], Tensor, Tensor, Sequence[bool], Tensor], Tensor]
    """(operands, places for the state before each chunk, state before the first, starts, place for the
    outputs) -> state after the last."""
    backward: Callable[[list[Tensor], Tensor, Tensor, Sequence[bool], list[Tensor]], Tensor]
    """(operands, the outputs where they are kept, and their gradient; state before each chunk and after the
    last; gradient of that last one; starts; places for the operands' gradients) -> gradient of the state
    before the first."""
    value: int
    """Which operand is like the outputs."""
    keeps_outputs: bool = False
    """For the backward pass."""

    def run(self, starts: Sequence[bool], state: Tensor, operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """All chunks of operands `[N, B, L, ...]`: the outputs, and the state after the last chunk."""
        return _Run.apply(self, starts, state, *operands)


class _Run(torch.autograd.Function):
    """Kept for the backward: the operands and the state before every chunk."""

    @staticmethod
    def forward(
        ctx: Any, rule: Rule, starts: Sequence[bool], state: Tensor, *operands: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(operands[rule.value], memory_format=torch.contiguous_format)
        states = state.new_empty(len(out) + 1, *state.shape)
        with exact_products(state):
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
        with torch.autocast(grad.device.type, enabled=False), exact_products(grad):
            for span in reversed(list(groups(grad))):
                own, into = [x[span] for x in (*kept, grad)], [x[span] for x in grads]
                around = states[span.start : span.stop + 1]
                d_state = ctx.rule.backward(own, around, d_state, ctx.starts[span], into)
        return None, None, d_state, *grads
