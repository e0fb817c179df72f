"""The walk backwards through one group of chunks.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..softmax import ALL, kernels
from ..softmax.joined import Gradient, Rows
from ..softmax.kernels import Mask
from .contributions import Entered, Sums
from .groups import Group
from .operands import Entering, Operands, Plan
from .slots import SlotGradients, Slots


def empty_gradients(x: Operands) -> Operands:
    """Gradients to be filled: of the queries by writing, of all others by adding, in at least fp32."""

    def zeros(like: Tensor | None) -> Any:
        return None if like is None else torch.zeros(like.shape, dtype=x.weight.dtype, device=like.device)

    return Operands(x.q.new_empty(x.q.shape), *(zeros(like) for like in x[1:]))


class _QueryGradient:
    """The gradient of a group's queries, from those of their versions for window keys and for slots."""

    def __init__(self, x: Operands, d: Operands, group: Group) -> None:
        self.queries, self.rows, self.d = x.queries(group), group.queries, d
        self.front: Tensor | None = None
        self.back: list[tuple[slice, Tensor]] = []

    def of_front(self, rows: Rows, share: Tensor) -> None:
        """Take in `[rows, C, H, D]` of the queries for window keys; the first share is of all queries."""
        if self.front is None:
            self.front = share.to(self.d.weight.dtype)
        else:
            add_rows(self.front, rows, share)

    def of_back(self, rows: slice, share: Tensor) -> None:
        """Take in `[rows, C, H, D]` of the queries for slots."""
        self.back.append((rows, share.to(self.d.weight.dtype)))

    def finish(self) -> None:
        assert self.front is not None
        q, total = self.queries.q, self.front
        _through_temperature(total, q, self.queries.front, self.d.front)
        for rows, share in self.back:
            _through_temperature(share, q[rows], self.queries.back, self.d.back)
            total[rows] += share
        self.d.q[self.rows] = total.to(self.d.q.dtype)


def _through_temperature(share: Tensor, q: Tensor, scale: Tensor | None, d_scale: Tensor | None) -> None:
    """Turn the gradient of `q * scale` into that of `q`, in place; adds to that of `scale`."""
    if scale is not None:
        assert d_scale is not None
        d_scale += torch.linalg.vecdot(share, q.to(share.dtype)).sum((0, 1))[:, None]
        share *= scale


def group_backward(
    plan: Plan,
    group: Group,
    entering: list[Entering],
    x: Operands,
    d: Operands,
    joint: tuple[Tensor, Tensor, Tensor],
    slots: Slots,
    d_slots: SlotGradients,
) -> Sums:
    """Gradients of what a group's tokens added, `[R, G, C, ...]`; adds those of its queries and windows.

    `slots` and `d_slots` come as they are before the group and after it, and leave as before it.
    """
    grad, out, lse = joint
    d_queries = _QueryGradient(x, d, group)
    front, back = d_queries.queries.scaled()
    k, v = x.k[group.keys], x.v[group.keys]
    inside = isinstance(group.keys, slice)
    d_k, d_v = (Gradient(t, total[group.keys] if inside else None) for t, total in ((k, d.k), (v, d.v)))
    for part in group.window:
        rows = part.q_rows
        own = grad[rows], front[rows], k[part.k_rows], v[part.k_rows], out[rows], lse[rows]
        share, *shares = kernels.backward(plan.kernel, *own, part.mask, plan.scale)
        d_queries.of_front(rows, share)
        for total, other in zip((d_k, d_v), shares, strict=True):
            total.add(part.k_rows, ALL, other)
    if not inside:
        add_rows(d.k, group.keys, d_k.total)
        add_rows(d.v, group.keys, d_v.total)
    d_added = slots_backward(plan, entering, joint, back, d_queries, slots, d_slots)
    d_queries.finish()
    return d_added


def slots_backward(
    plan: Plan,
    entering: list[Entering],
    joint: tuple[Tensor, Tensor, Tensor],
    back: Tensor,
    d_queries: _QueryGradient,
    slots: Slots,
    d_slots: SlotGradients,
) -> Sums:
    """Make the updates and take them back one by one; adds to the gradient of the queries."""
    grad, out, lse = joint
    changes = [slots.advance(new, at) for _, new, at, _ in entering]
    d_added = Sums(*(_empty_rows(field) for field in zip(*(new for _, new, _, _ in entering), strict=True)))
    d_added.radius.zero_()
    end = len(d_added.keys)
    for step, _, at, readers in reversed(entering):
        if readers is not None:
            own = back[readers]
            keys, values = slots.readable(len(own), step.after)
            whole = (grad[readers], own, keys, values, out[readers], lse[readers])
            share, *shares = kernels.backward(plan.kernel, *whole, Mask.FULL, plan.scale)
            d_queries.of_back(readers, share)
            d_slots.add(*shares)
        start = end - len(at.tokens)
        change = changes.pop()
        d_slots.take_back(change, at, Sums(*(x[start:end] for x in d_added)))
        slots.restore(change, at)
        end = start
    shape = (-1, plan.spec.chunk, slots.sums.keys.shape[1])
    return Sums(*(x.unflatten(0, shape).transpose(1, 2) for x in d_added))


def _empty_rows(updates: Sequence[Tensor]) -> Tensor:
    """Rows for what tokens `[n, G, C, ...]` of several updates added."""
    return updates[0].new_empty(sum(x[..., 0].numel() for x in updates), updates[0].shape[-1])


def entered_backward(plan: Plan, group: Group, entered: Entered, slopes: Sums, d: Operands) -> None:
    """Add the share of what entered the state."""
    k, v, gate = entered.backward(slopes, d.norm)
    for total, share in ((d.k[..., plan.spec.rotary_dim :], k), (d.v, v), (d.gate, gate)):
        if share is not None:
            add_rows(total, group.entering, share)


def add_rows(total: Tensor | None, rows: Rows, share: Tensor | None) -> None:
    assert total is not None
    assert share is not None
    if isinstance(rows, slice):
        total[rows] += share
    else:
        total.index_add_(0, rows, share.to(total.dtype))
