"""The four steps of KVM attention, group of chunks by group of chunks (see `groups`).

A group's queries attend to their windows all at once. Then its chunks are routed and enter the slots one by
one (see `slots`), and after each the queries that read the slots as they are attend to them. The backward
walks the groups in reverse: it makes a group's updates again, as they were decided, and takes them back one
by one. So beside the inputs, the outputs and their gradients nothing as long as the sequence is kept.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..softmax import Part
from ..softmax.joined import Joint
from .contributions import Entered, Sums
from .operands import Operands, Plan, decided_updates, group_updates
from .routing import Choice, joined_choices
from .slots import SlotGradients
from .walk_backward import empty_gradients, entered_backward, group_backward


class Walk(torch.autograd.Function):
    """The four steps, with the backward of the whole."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> tuple[Tensor | None, ...]:
        """`tensors`: operands, and base sums (or None).

        Returns heads `[R, C, H, D]`; what was decided, each `[R, G, C]` (see `Choice`); log-sum-exp
        `[R, H, C]` over the window (where statistics are wanted) and over all keys; and the slots after the
        last update.
        """
        x, before = Operands(*tensors[:8]), optional_sums(tensors[8:])
        rows, chunk, heads, _ = x.q.shape
        y = x.q.new_empty(x.q.shape)
        lse = x.weight.new_empty(rows, heads, chunk)
        window = torch.empty_like(lse) if plan.statistics else None
        slots = plan.slots(x)
        if before is not None:
            slots.start(before, plan.size)
        choices: list[Choice] = []
        kept: list[Tensor] = []
        for group in plan.groups:
            if plan.differentiable:
                kept += slots.copy(group.steps[0].sequences, group.steps[0].before)
            front, back = x.queries(group).scaled()
            joint = Joint(front, y[group.queries] if isinstance(group.queries, slice) else None)
            k, v = x.k[group.keys], x.v[group.keys]
            joint.add(plan.kernel, [front], [k], [v], group.window, plan.scale)
            if window is not None:
                window[group.queries] = joint.lse
            for choice, (step, new, at, readers) in decided_updates(plan, group, x, slots):
                choices.append(choice)
                slots.update(new, at)
                if readers is not None:
                    keys, values = slots.readable(readers.stop - readers.start, step.after)
                    joint.add(plan.kernel, [back], [keys], [values], [Part(readers)], plan.scale)
            out, lse[group.queries] = joint.result()
            if not isinstance(group.queries, slice):
                y[group.queries] = out
        slot, founds, margin = joined_choices(choices)
        ctx.save_for_backward(slot, founds, y, lse, *x, *kept)
        ctx.plan, ctx.has_base = plan, before is not None
        decided = [t for t in (slot, founds, margin, window, lse) if t is not None]
        ctx.mark_non_differentiable(*decided)
        ctx.set_materialize_grads(False)
        last = plan.groups[-1].steps[-1].sequences
        return y, slot, founds, margin, window, lse, *(x[:last] for x in slots.sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Any) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        slot, founds, y, lse, *more = ctx.saved_tensors
        x, kept = Operands(*more[:8]), list(more[8:])
        if grad is None:
            grad = torch.zeros_like(y)
        d = empty_gradients(x)
        slots = plan.slots(x)
        d_slots = SlotGradients(slots, optional_sums(grads[-3:]), d.norm)
        before = None
        for group in reversed(plan.groups):
            before = Sums(*kept[-3:])
            del kept[-3:]
            slots.start(before, group.steps[-1].after)
            entered = Entered(*x.entering(group), founds[group.rows], group.steps, plan.spec, x.norm)
            entering = group_updates(plan, group, entered.sums, slot[group.rows])
            joint = grad[group.queries], y[group.queries], lse[group.queries]
            d_added = group_backward(plan, group, entering, x, d, joint, slots, d_slots)
            entered_backward(plan, group, entered, d_added, d)
        base = d_slots.first(before) if ctx.has_base and before else (None, None, None)
        found = (
            None if t is None or like is None else t.to(like.dtype) for t, like in zip(d, x, strict=True)
        )
        return None, *found, *base


def optional_sums(tensors: Sequence[Tensor | None]) -> Sums | None:
    """None where there is nothing at all."""
    present = [x for x in tensors if x is not None]
    assert len(present) in (0, 3)
    return Sums(*present) if present else None
