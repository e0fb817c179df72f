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
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..softmax import Part
from ..softmax.joined import Gradient, Joint, Rows, part_gradients
from .chunks import Group
from .contributions import Entered, Norm, Sums, Tokens, contributions, prepare, weights
from .routing import Choice, Replay, first_slots, joined_choices, route
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
from .spec import KVMSpec


@dataclass(frozen=True)
class Plan:
    """Settings and order of a walk: all it needs beside tensors."""

    spec: KVMSpec
    scale: float
    kernel: str
    groups: list[Group]
    replay: Replay | None
    margins: bool


class Inputs(NamedTuple):
    """The walk's differentiable inputs, or their gradients."""

    q: Tensor  # [R, C, H, D]
    k: Tensor  # [R, C, G, D]
    v: Tensor
    gate: Tensor | None  # [R, C, G]
    front: Tensor | None  # [H, 1], temperatures of window keys
    back: Tensor | None  # and of slots
    weight: Tensor  # [D], the norm of state keys
    bias: Tensor

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.bias)

    def entering(self, group: Group) -> Tokens:
        """Select the tokens of a group that enter the state, by row."""
        return Tokens(*self[1:4]).map(lambda x: x[group.entering, group.entering_tokens])


class Walked(NamedTuple):
    """Results of a walk, by row."""

    y: Tensor  # heads [R, C, H, D]
    choice: Choice  # of the rows that entered, [R, G, C]
    window: Tensor  # log-sum-exp over the window alone, [R, H, C]
    lse: Tensor  # over all keys


def walk(plan: Plan, x: Inputs, slots: Slots, kept: list[Tensor] | None = None) -> Walked:
    """Take the four steps for all chunks; `slots` change in place.

    `kept` receives copies of the slots before every group, which the backward needs.
    """
    rows, tokens, heads, _ = x.q.shape
    y, lse = x.q.new_empty(x.q.shape), x.weight.new_empty(rows, heads, tokens)
    window, choices = torch.empty_like(lse), []
    for group in plan.groups:
        if kept is not None:
            kept += [sums.clone() for sums in slots.used()]
        q = x.q[group.queries]
        joint = Joint(q, y[group.queries] if isinstance(group.queries, slice) else None)
        attend(plan, joint, scaled(q, x.front), x.k[group.keys], x.v[group.keys], group.window)
        window[group.queries] = joint.lse
        q = scaled(q, x.back)
        entering = _entering(plan, x, group)
        for update, readers in group.chunks:
            if update is not None:
                prepared, values, gate = next(entering)
                choice = route(prepared, gate, slots, update, plan.replay, plan.margins)
                weight = weights(choice.founds, gate, [update], plan.spec)
                accumulate(slots, contributions(prepared, values, weight, plan.spec), choice.slot, update)
                choices.append(choice)
            if readers is not None:
                keys, values = read(slots)
                attend(plan, joint, q, keys, values, [Part(readers)])
        out, lse[group.queries] = joint.result()
        if not isinstance(group.queries, slice):
            y[group.queries] = out
    if not choices:
        nothing = x.k.transpose(1, 2)[:, :, :0]
        choices = [first_slots(nothing, margins=plan.margins)]
    return Walked(y, joined_choices(choices), window, lse)


def _entering(plan: Plan, x: Inputs, group: Group) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Give prepared keys, values and gates `[n, G, C, ...]` of each update in turn."""
    sizes = [update.sequences for update in group.updates]
    if not sizes:
        return iter(())
    k, v, gate = x.entering(group).map(lambda t: t.transpose(1, 2))
    keys = prepare(k, plan.spec.rotary_dim, x.norm)
    gates = [None] * len(sizes) if gate is None else gate.split(sizes)
    return zip(keys.split(sizes), v.split(sizes), gates, strict=True)


def scaled(q: Tensor, temperature: Tensor | None) -> Tensor:
    """Multiply queries `[..., H, D]` by their heads' temperatures."""
    return q if temperature is None else (q * temperature).to(q.dtype)


def attend(plan: Plan, joint: Joint, q: Tensor, keys: Tensor, values: Tensor, parts: list[Part]) -> None:
    """Step 4: take more keys into the softmax of a group's queries."""
    joint.add(plan.kernel, [q], [keys], [values], parts, plan.scale)


def attend_backward(
    plan: Plan,
    joint: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: list[Part],
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Any]:
    """Return gradients of `q`, `keys` and `values`, in at least fp32.

    `joint`: the output's gradient, the output, and the log-sum-exp, of the whole softmax; `into`: what the
    gradients of keys and values are added to.
    """
    d_q, d_keys, d_values = found = Gradient(q), Gradient(keys, into[0]), Gradient(values, into[1])
    gradients = [d_q], [d_keys], [d_values]
    part_gradients(plan.kernel, joint, [q], [keys], [values], parts, plan.scale, gradients)
    return [x.total for x in found]


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
    before, (slot, founds) = slots.box, decided
    q = x.q[group.queries]
    back = scaled(q, x.back)
    d_q = _window_backward(plan, group, x, d, joint)
    entered = Entered(x.entering(group), founds, group.updates, plan.spec, x.norm)
    changes = _made_again(group, entered.sums, slot, slots)
    d_slots, d_added, end = SlotGradients(slots, last, d.norm), _rows_like(entered.sums), len(founds)
    for (update, readers), (places, refreshed) in zip(reversed(group.chunks), reversed(changes), strict=True):
        if readers is not None and refreshed is not None:
            keys, values = slots.visible(refreshed.box)
            own = joint[0][readers], joint[1][readers], joint[2][readers]
            d_own, *d_form = attend_backward(plan, own, back[readers], keys, values, [Part()])
            _through_temperature(d_own, q[readers], x.back, d.back)
            d_q[readers] += d_own
            d_slots.add(*d_form)
            read_backward(slots, refreshed, d_slots)
        if update is not None and places is not None:
            own_rows = slice(end - update.sequences, end)
            accumulate_backward(places, d_slots, Sums(*(t[own_rows] for t in d_added)))
            end -= update.sequences
    d.q[group.queries] = d_q.to(d.q.dtype)
    d_tokens = entered.backward(Sums(*(rows.transpose(1, 2) for rows in d_added)), d.norm)
    for total, found in zip((d.k[..., plan.spec.rotary_dim :], d.v, d.gate), d_tokens, strict=True):
        if total is not None and found is not None:
            _add_rows(total[:, group.entering_tokens], group.entering, found)
    return Sums(*(sums[before] for sums in d_slots.sums))


def _window_backward(
    plan: Plan, group: Group, x: Inputs, d: Inputs, joint: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Add gradients of the window's keys and values; return the queries', in at least fp32."""
    q, k, v = x.q[group.queries], x.k[group.keys], x.v[group.keys]
    if not group.window:
        return q.to(x.weight.dtype)  # no queries
    into = (d.k[group.keys], d.v[group.keys]) if isinstance(group.keys, slice) else (None, None)
    d_q, d_k, d_v = attend_backward(plan, joint, scaled(q, x.front), k, v, group.window, into)
    if into[0] is None:
        _add_rows(d.k, group.keys, d_k)
        _add_rows(d.v, group.keys, d_v)
    _through_temperature(d_q, q, x.front, d.front)
    return d_q


def _through_temperature(d_q: Tensor, q: Tensor, scale: Tensor | None, d_scale: Tensor | None) -> None:
    """Turn the gradient of `q * scale` into that of `q`, in place; adds to that of `scale`."""
    if scale is not None and d_scale is not None:
        d_scale += torch.linalg.vecdot(d_q, q.to(d_q.dtype)).sum((0, 1))[:, None]
        d_q *= scale


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


def _add_rows(total: Tensor, rows: Rows, share: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += share
    else:
        total.index_add_(0, rows, share.to(total.dtype))


class Walk(torch.autograd.Function):
    """`walk` from given sums on, with its backward."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, slots: Slots, *tensors: Any) -> tuple[Tensor | None, ...]:
        """Return what `walk` does, and the sums after the last update.

        `tensors`: `Inputs`, and the sums of which `slots` holds a copy.
        """
        x, kept = Inputs(*tensors[: len(Inputs._fields)]), []  # type: ignore[var-annotated]
        y, choice, window, lse = walk(plan, x, slots, kept)
        ctx.plan = plan
        ctx.save_for_backward(y, lse, choice.slot, choice.founds, *x, *kept)
        ctx.mark_non_differentiable(*(t for t in (*choice, window, lse) if t is not None))
        ctx.set_materialize_grads(False)
        return y, *choice, window, lse, *slots.used()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *grads: Any) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        y, lse, slot, founds, *more = ctx.saved_tensors
        x, kept = Inputs(*more[: len(Inputs._fields)]), more[len(Inputs._fields) :]
        grad = torch.zeros_like(y) if grad is None else grad
        d, last, end = _empty_gradients(x), grads[-3:], len(slot)
        for group in reversed(plan.groups):
            slots = Slots(Sums(*kept[-3:]), group.slots, x.norm, plan.spec, x.k.dtype)
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
