"""The four steps of KVM attention for chunk after chunk, forward and backward.

Chunks are worked on by groups (see `chunks`). A group's queries attend to their windows all at once. Then its
chunks are routed and accumulated one by one, and after each the queries that read the slots as they are
attend to them. The backward walks the groups in reverse: it makes a group's updates again, as they were
decided, and takes them back one by one. So beside the inputs, the outputs and their gradients nothing as long
as the sequence is kept.

Shapes: R rows of queries or of keys, C tokens of a row, H query heads, G key/value heads, S slots, D head
size. Rows that enter the state are ordered by update, then by sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..softmax import Part
from ..softmax.joined import Joint
from .attend import (
    Backward,
    Inputs,
    Plan,
    add_rows,
    attend,
    bias_slope,
    scaled,
    state_backward,
    window_backward,
)
from .chunks import Group
from .contributions import Entered, Sums, contributions, prepare, weights
from .parallel import walk_group, walk_group_backward
from .routing import Choice, first_slots, joined_choices, route
from .slots import (
    Places,
    Refreshed,
    SlotGradients,
    Slots,
    accumulate,
    accumulate_backward,
    read,
    read_backward,
    refresh,
)


class Walked(NamedTuple):
    """Results of a walk, by row."""

    y: Tensor  # heads [R, C, H, D]
    choice: Choice  # of the rows that entered, [R, G, C]
    window: Tensor | None  # log-sum-exp over the window alone, [R, H, C], if asked for
    lse: Tensor  # over all keys
    slope: Tensor | None  # derivative of y by the state's bias, like y, if there is one and a backward


def walk(plan: Plan, x: Inputs, slots: Slots, kept: list[Tensor] | None = None) -> Walked:
    """Take the four steps for all chunks; `slots` change in place.

    `kept` receives copies of the slots before every group, which the backward needs.
    """
    rows, tokens, heads, _ = x.q.shape
    y, lse = x.q.new_empty(x.q.shape), x.weight.new_empty(rows, heads, tokens)
    window, choices = torch.empty_like(lse) if plan.measured else None, []
    slope = torch.zeros_like(y) if kept is not None and x.state_bias is not None else None
    for group in plan.groups:
        if kept is not None:
            kept += [sums.clone() if group.steps is None else sums for sums in slots.used()]
        q = x.q[group.queries]
        joint = Joint(q, y[group.queries] if isinstance(group.queries, slice) else None)
        attend(plan, joint, scaled(q, x.front), x.k[group.keys], x.v[group.keys], group.window)
        if window is not None:
            window[group.queries] = joint.lse
        before = None if slope is None or joint.out is None else (joint.out.clone(), joint.lse.clone())
        q = scaled(q, x.back)
        take_in = walk_chunks if group.steps is None else walk_group
        choices += take_in(plan, x, group, slots, joint, q)
        if slope is not None and before is not None:
            slope[group.queries] = bias_slope(joint, before).to(slope.dtype)
        out, lse[group.queries] = joint.result()
        if not isinstance(group.queries, slice):
            y[group.queries] = out
    if not choices:
        nothing = x.k.transpose(1, 2)[:, :, :0]
        choices = [first_slots(nothing, margins=plan.margins)]
    return Walked(y, joined_choices(choices), window, lse, slope)


def walk_chunks(plan: Plan, x: Inputs, group: Group, slots: Slots, joint: Joint, q: Tensor) -> list[Choice]:
    """Take the four steps chunk by chunk; `q`: what meets slots; gives the decisions of every update."""
    entering, choices = _entering(plan, x, group), []
    for update, readers in group.chunks:
        if update is not None:
            prepared, values, gate = next(entering)
            choice = route(prepared, gate, slots, update, plan.replay, plan.margins)
            weight = weights(choice.founds, gate, [update], plan.spec)
            accumulate(slots, contributions(prepared, values, weight, plan.spec), choice.slot, update)
            choices.append(choice)
        if readers is not None:
            keys, values = read(slots)
            attend(plan, joint, q, keys, values, [Part(readers)], x.state_bias)
    return choices


def _entering(plan: Plan, x: Inputs, group: Group) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Give prepared keys, values and gates `[n, G, C, ...]` of each update in turn."""
    sizes = [update.sequences for update in group.updates]
    if not sizes:
        return iter(())
    k, v, gate = x.entering(group).map(lambda t: t.transpose(1, 2))
    keys = prepare(k, plan.spec.rotary_dim, x.norm)
    gates = [None] * len(sizes) if gate is None else gate.split(sizes)
    return zip(keys.split(sizes), v.split(sizes), gates, strict=True)


def group_backward(
    plan: Plan,
    group: Group,
    x: Inputs,
    d: Inputs,
    joint: tuple[Tensor, Tensor, Tensor],
    decided: tuple[Tensor, Tensor],
    slots: Slots,
    last: Sequence[Tensor | None],
) -> Sums:
    """Walk one group backwards; adds to the gradients `d` of the inputs.

    Args:
        joint: the output's gradient, the output, and the log-sum-exp, of the group's queries.
        decided: `slot` and `founds` of the rows that enter in this group (see `Choice`).
        slots: as they were before the group.
        last: gradients of the sums after the group.

    Returns:
        Gradients of the sums before the group.
    """
    slot, founds = decided
    b = Backward(plan, group, x, d, window_backward(plan, group, x, d, joint), joint)
    entered = Entered(x.entering(group), founds, group.updates, plan.spec, x.norm)
    take_back = walk_chunks_backward if group.steps is None else walk_group_backward
    d_before, d_added = take_back(b, entered.sums, slot, slots, last)
    d.q[group.queries] = b.d_q.to(d.q.dtype)
    d_tokens = entered.backward(d_added, d.norm)
    for total, found in zip((d.k[..., plan.spec.rotary_dim :], d.v, d.gate), d_tokens, strict=True):
        if total is not None and found is not None:
            add_rows(total[:, group.entering_tokens], group.entering, found)
    return d_before


def walk_chunks_backward(
    b: Backward, added: Sums, slot: Tensor, slots: Slots, last: Sequence[Tensor | None]
) -> tuple[Sums, Sums]:
    """Take back chunk by chunk what `walk_chunks` did.

    `added`: what tokens added, `[R, G, C, ...]`, to the slots `slot`; `slots`: as they were before the group;
    `last`: gradients of the sums after it. Returns gradients of the sums before, and of `added`.
    """
    before = slots.box
    changes = _made_again(b.group, added, slot, slots)
    d_slots, d_added, end = SlotGradients(slots, last, b.d.norm), _rows_like(added), len(slot)
    turns = zip(reversed(b.group.chunks), reversed(changes), strict=True)
    for (update, readers), (places, refreshed) in turns:
        if readers is not None and refreshed is not None:
            d_slots.add(*state_backward(b, readers, *slots.visible(refreshed.box), [Part()]))
            read_backward(slots, refreshed, d_slots)
        if update is not None and places is not None:
            own_rows = slice(end - update.sequences, end)
            accumulate_backward(places, d_slots, Sums(*(t[own_rows] for t in d_added)))
            end -= update.sequences
    d_before = Sums(*(sums[before] for sums in d_slots.sums))
    return d_before, Sums(*(rows.transpose(1, 2) for rows in d_added))


def _made_again(
    group: Group, added: Sums, slot: Tensor, slots: Slots
) -> list[tuple[Places | None, Refreshed | None]]:
    """Make a group's updates as they were decided; `added` and `slot` are of all its rows."""
    sizes = [update.sequences for update in group.updates]
    rows = zip(slot.split(sizes), *(x.split(sizes) for x in added), strict=True)
    changes = []
    for update, readers in group.chunks:
        places = None
        if update is not None:
            own_slot, *own = next(rows)
            places = accumulate(slots, Sums(*own), own_slot, update)
        changes.append((places, None if readers is None else refresh(slots, keep=True)))
    return changes


def _rows_like(added: Sums) -> Sums:
    """Make room for gradients of what tokens added, `[R, C, G, ...]`; 0 of radii, as most change none."""
    keys, values, radius = (x.transpose(1, 2) for x in added)
    return Sums(keys.new_empty(keys.shape), values.new_empty(keys.shape), radius.new_zeros(radius.shape))


class Walk(torch.autograd.Function):
    """`walk` from given sums on, with its backward."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, slots: Slots, *tensors: Any) -> tuple[Tensor | None, ...]:
        """Return what `walk` does, and the sums after the last update.

        `tensors`: `Inputs`, and the sums of which `slots` holds a copy.
        """
        x, kept = Inputs(*tensors[: len(Inputs._fields)]), []  # type: ignore[var-annotated]
        y, choice, window, lse, slope = walk(plan, x, slots, kept)
        ctx.plan = plan
        ctx.save_for_backward(y, lse, slope, choice.slot, choice.founds, *x, *kept)
        ctx.mark_non_differentiable(*(t for t in (*choice, window, lse) if t is not None))
        ctx.set_materialize_grads(False)
        return y, *choice, window, lse, *slots.used()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Any) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        y, lse, slope, slot, founds, *more = ctx.saved_tensors
        x, kept = Inputs(*more[: len(Inputs._fields)]), more[len(Inputs._fields) :]
        grad = torch.zeros_like(y) if grad is None else grad
        d, last, end = _empty_gradients(x), grads[-3:], len(slot)
        if d.state_bias is not None:
            by_head = torch.linalg.vecdot(grad.to(lse.dtype), slope.to(lse.dtype)).sum((0, 1))
            d.state_bias.add_(by_head[:, None])
        for group in reversed(plan.groups):
            room = group.slots if group.steps is None else None
            slots = Slots(Sums(*kept[-3:]), room, x.norm, plan.spec, x.k.dtype)
            del kept[-3:]
            joint = grad[group.queries], y[group.queries], lse[group.queries]
            start = end - sum(update.sequences for update in group.updates)
            decided = slot[start:end], founds[start:end]
            last = group_backward(plan, group, x, d, joint, decided, slots, last)
            end = start
        found = (
            None if t is None or like is None else t.to(like.dtype) for t, like in zip(d, x, strict=True)
        )
        return None, None, *found, *last


def _empty_gradients(x: Inputs) -> Inputs:
    """Make gradients to be filled: of the queries by writing, of all others by adding, in at least fp32."""

    def zeros(like: Tensor | None) -> Any:
        return None if like is None else torch.zeros(like.shape, dtype=x.weight.dtype, device=like.device)

    return Inputs(x.q.new_empty(x.q.shape), *(zeros(like) for like in x[1:]))
