"""The four steps of KVM attention for many chunks at once, on a grid of chunks.

Routing comes first, for all chunks. The rest goes by groups of chunks (see `groups`): a group's queries
attend to their windows all at once; then its chunks enter the slots one by one (see `slots`), and after each
the queries that read the slots as they are attend to them. The backward walks the groups in reverse: it makes
a group's updates again and takes them back one by one. So beside the inputs, the outputs and their gradients
nothing as long as the sequence is ever made or kept.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base import LayerError
from ..softmax import ALL, Part, kernels
from ..softmax.grid import ChunkGrid
from ..softmax.joined import Gradient, Joint, Rows
from ..softmax.kernels import Mask, choose
from .groups import Group, groups
from .routing import Choice, Norm, Routes, first_slots, prepare, route
from .slots import Places, SlotGradients, Slots, Sums, contributions, places
from .spec import KVMSpec, Update


class Queries(NamedTuple):
    """Queries and what multiplies them, for window keys and for slots (None: 1)."""

    q: Tensor  # [..., H, D]
    front: Tensor | None  # [H, 1], in at least fp32
    back: Tensor | None

    def scaled(self) -> tuple[Tensor, Tensor]:
        """The queries for window keys and those for slots."""
        q = self.q
        front, back = (q if t is None else (q * t).to(q.dtype) for t in (self.front, self.back))
        return front, back

    def split(self, lengths: Sequence[int]) -> list[Self]:
        """Cut `[B, T, H, D]` by tokens."""
        return [self._replace(q=q) for q in self.q.split(list(lengths), 1)]


@dataclass(frozen=True)
class Call:
    """What one call of the operator needs everywhere."""

    spec: KVMSpec
    norm: Norm
    scale: float
    replay: Routes | None
    margins: bool
    statistics: dict[str, Tensor] | None

    def note(self, slots: float, tokens: float, mass: Tensor) -> None:
        """Statistics of a sequence with so many slots, which hold so many tokens; `mass`: on slots, one entry
        for each query."""
        if self.statistics is not None:
            self.statistics["slots"] = torch.tensor(float(slots))
            self.statistics["tokens_per_slot"] = torch.tensor(tokens / slots)
            self.statistics["state_mass"] = mass.mean()


def on_grid(
    call: Call,
    grid: ChunkGrid,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    steps: list[Update],
    base: Sums | None,
    starts: list[tuple[int, int]],
) -> tuple[Tensor, Choice, Sums]:
    """All four steps for the chunks of a grid.

    Args:
        k, v, gate: by token, including those held from earlier calls.
        steps: the updates to make; one at least.
        base: slots before the first of them.
        starts: where in given routes each sequence's tokens start.

    Returns:
        Heads by token `[B, T, H, D]`, the choices for the tokens that entered, and the slots after the last
        step (of the sequences that take part in it).
    """
    spec = call.spec
    q, k, v = grid.queries(queries.q), grid.keys(k), grid.keys(v)
    gate = None if gate is None else grid.keys(gate)
    walk = groups(spec, grid, steps, k.device)
    entering = _entering(call, walk, k, gate)
    choice = decide(call, entering, steps, None if base is None else base.keys, starts)
    plan = _Plan(spec, call.scale, choose(q), walk, torch.is_grad_enabled(), call.statistics is not None)
    operands = _Operands(q, k, v, gate, queries.front, queries.back, *call.norm)
    before = (None, None, None) if base is None else base
    y, window, whole, *last = _Chunks.apply(plan, choice.slot, choice.founds, *operands, *before)
    if call.statistics is not None:
        mass = grid.tokens_of((1 - torch.exp(window - whole)).transpose(1, 2))
        numbers = [max(s.end - 1 - spec.window_chunks, 0) for s in grid.spans]
        after = {step.number: step.after for step in steps}
        slots = sum(after[number] for number in numbers)
        call.note(slots / len(numbers), sum(n + 1 for n in numbers) * spec.chunk / len(numbers), mass)
    return grid.tokens_of(y), choice, Sums(*last)


Entering = tuple[Tensor, Tensor | None]
"""Prepared keys `[n, G, C, D]` of one update and their gates `[n, G, C]`."""


def _entering(call: Call, walk: list[Group], k: Tensor, gate: Tensor | None) -> Iterator[Entering]:
    """What enters the state, update by update, made when it is needed."""
    for group in walk:
        sizes = [step.sequences for step in group.steps]
        keys = prepare(k[group.entering], call.spec.rotary_dim, call.norm).transpose(1, 2).split(sizes)
        gates = [None] * len(sizes) if gate is None else gate[group.entering].transpose(1, 2).split(sizes)
        yield from zip(keys, gates, strict=True)


@torch.no_grad()
def decide(
    call: Call,
    entering: Iterable[Entering],
    steps: Sequence[Update],
    base: Tensor | None,
    starts: list[tuple[int, int]],
) -> Choice:
    """Where the steps' tokens go: routed, or as given."""
    if call.replay is None:
        return route(entering, steps, call.spec, call.norm, base, call.margins)
    found = []
    for step in steps:
        if step.number == 0:
            found.append(first_slots(next(iter(entering))[0]))
        else:
            found += [
                _given(call.replay, b, start + step.number * call.spec.chunk, call.spec.chunk)
                for b, start in starts[: step.sequences]
            ]
    return Choice(torch.cat([c.slot for c in found]), torch.cat([c.founds for c in found]))


def _given(routes: Routes, batch_row: int, position: int, count: int) -> Choice:
    """Given routes of `count` tokens from absolute `position` on."""
    begin = position - routes.first
    if begin < 0 or begin + count > routes.slot.shape[2]:
        raise LayerError(
            f"the given routes are for {routes.slot.shape[2]} tokens from {routes.first} on; "
            f"this call needs them for {count} from {position} on"
        )
    span = (slice(batch_row, batch_row + 1), slice(None), slice(begin, begin + count))
    return Choice(routes.slot[span].long(), routes.founds[span])


@dataclass(frozen=True)
class _Plan:
    spec: KVMSpec
    scale: float
    kernel: str
    groups: list[Group]
    differentiable: bool
    statistics: bool

    @property
    def size(self) -> int:
        """Slots after the last update."""
        return self.groups[-1].steps[-1].after

    def slots(self, x: _Operands) -> Slots:
        """Empty ones."""
        heads, dim = x.k.shape[2:]
        shape = (self.groups[0].steps[0].sequences, heads, self.size, dim)
        return Slots(shape, x.norm, self.spec, x.k.dtype)


class _Operands(NamedTuple):
    """What gradients are for, or gradients: of `q` `[R, C, H, D]`, `k` and `v` `[K, C, G, D]`, `gate`
    `[K, C, G]`, the temperatures `[H, 1]` and the norm `[D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None
    front: Tensor | None
    back: Tensor | None
    weight: Tensor
    bias: Tensor

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.bias)

    def queries(self, group: Group) -> Queries:
        return Queries(self.q[group.queries], self.front, self.back)

    def entering(self, group: Group) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """What the group's contributions are made of."""
        gate = None if self.gate is None else self.gate[group.entering]
        return self.k[group.entering], self.v[group.entering], gate, self.weight, self.bias


class _Entering(NamedTuple):
    """One update: what its tokens add, `[n, G, C, ...]`, and where."""

    step: Update
    added: Sums
    at: Places
    readers: slice | None
    """Which of the group's queries read the slots it leaves."""


def _contributions(
    plan: _Plan,
    group: Group,
    founds: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    bias: Tensor,
) -> Sums:
    """What the group's tokens add to their slots, `[R, G, C, ...]`."""
    keys = prepare(k, plan.spec.rotary_dim, Norm(weight, bias)).transpose(1, 2)
    gate = None if gate is None else gate.transpose(1, 2)
    return contributions(keys, v.transpose(1, 2), gate, founds[group.rows], group.steps, plan.spec)


def _updates(plan: _Plan, group: Group, added: Sums, slot: Tensor) -> list[_Entering]:
    """The group's updates; `slot` `[R, G, C]` of all rows that enter."""
    sizes = [step.sequences for step in group.steps]
    each = zip(*(x.split(sizes) for x in added), strict=True)
    ways = slot[group.rows].split(sizes)
    return [
        _Entering(step, Sums(*new), places(way, step, plan.size, plan.spec), readers)
        for step, new, way, readers in zip(group.steps, each, ways, group.readers, strict=True)
    ]


class _Chunks(torch.autograd.Function):
    """Steps 2 to 4, with the backward of the whole."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, slot: Tensor, founds: Tensor, *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        """`tensors`: operands, and base sums (or None).

        Returns heads `[R, C, H, D]`, log-sum-exp `[R, H, C]` over the window (where statistics are wanted)
        and over all keys, and the slots after the last update.
        """
        x, before = _Operands(*tensors[:8]), _sums(tensors[8:])
        rows, chunk, heads, _ = x.q.shape
        y = x.q.new_empty(x.q.shape)
        lse = x.weight.new_empty(rows, heads, chunk)
        window = torch.empty_like(lse) if plan.statistics else None
        slots = plan.slots(x)
        if before is not None:
            slots.start(before, plan.size)
            slots.read_all(*before.keys.shape[:3:2])
        kept: list[Tensor] = []
        for group in plan.groups:
            if plan.differentiable:
                kept += slots.copy(group.steps[0].sequences, group.steps[0].before)
            front, back = x.queries(group).scaled()
            joint = Joint(front)
            k, v = x.k[group.keys], x.v[group.keys]
            joint.add(plan.kernel, [front], [k], [v], group.window, plan.scale)
            if window is not None:
                window[group.queries] = joint.lse
            added = _contributions(plan, group, founds, *x.entering(group))
            for step, new, at, readers in _updates(plan, group, added, slot):
                slots.update(new, at)
                if readers is not None:
                    keys, values = slots.readable(readers.stop - readers.start, step.after)
                    joint.add(plan.kernel, [back], [keys], [values], [Part(readers)], plan.scale)
            y[group.queries], lse[group.queries] = joint.result()
        ctx.save_for_backward(slot, founds, y, lse, *x, *kept)
        ctx.plan, ctx.has_base = plan, before is not None
        ctx.mark_non_differentiable(lse, *([] if window is None else [window]))
        ctx.set_materialize_grads(False)
        last = plan.groups[-1].steps[-1].sequences
        return y, window, lse, *(x[:last] for x in slots.sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _window: Any, _lse: Any, *grad_last: Any) -> tuple[Any, ...]:
        plan: _Plan = ctx.plan
        slot, founds, y, lse, *more = ctx.saved_tensors
        x, kept = _Operands(*more[:8]), list(more[8:])
        if grad is None:
            grad = torch.zeros_like(y)
        d = _gradients(x)
        slots = plan.slots(x)
        d_slots = SlotGradients(slots, _sums(grad_last), d.norm)
        before = None
        for group in reversed(plan.groups):
            before = Sums(*kept[-3:])
            del kept[-3:]
            slots.start(before, group.steps[-1].after)
            with torch.enable_grad():
                leaves: list[Any] = [
                    t if t is None else t.detach().requires_grad_() for t in x.entering(group)
                ]
                added = _contributions(plan, group, founds, *leaves)
            entering = _updates(plan, group, Sums(*(s.detach() for s in added)), slot)
            joint = grad[group.queries], y[group.queries], lse[group.queries]
            d_added = _group_backward(plan, group, entering, x, d, joint, slots, d_slots)
            _contributions_backward(group, added, leaves, d_added, d)
        base = d_slots.first(before) if ctx.has_base and before else (None, None, None)
        found = (
            None if t is None or like is None else t.to(like.dtype) for t, like in zip(d, x, strict=True)
        )
        return None, None, None, *found, *base


def _gradients(x: _Operands) -> _Operands:
    """Gradients to be filled: of the queries by writing, of all others by adding, in at least fp32."""

    def zeros(like: Tensor | None) -> Any:
        return None if like is None else torch.zeros(like.shape, dtype=x.weight.dtype, device=like.device)

    return _Operands(x.q.new_empty(x.q.shape), *(zeros(like) for like in x[1:]))


class _QueryGradient:
    """The gradient of a group's queries, gathered from their versions for window keys and for slots."""

    def __init__(self, x: _Operands, d: _Operands, group: Group) -> None:
        self.queries, self.rows, self.d = x.queries(group), group.queries, d
        self.total: Tensor | None = None

    def of_front(self, rows: Rows, share: Tensor) -> None:
        """Take in `[rows, C, H, D]` of the queries for window keys; the first share is of all queries."""
        self._take(rows, share, self.queries.front, self.d.front)

    def of_back(self, rows: Rows, share: Tensor) -> None:
        """Take in `[rows, C, H, D]` of the queries for slots."""
        self._take(rows, share, self.queries.back, self.d.back)

    def _take(self, rows: Rows, share: Tensor, scale: Tensor | None, d_scale: Tensor | None) -> None:
        share = share.to(self.d.weight.dtype)
        if scale is not None:
            assert d_scale is not None
            d_scale += (share * self.queries.q[rows]).sum((0, 1, 3))[:, None]
            share *= scale
        if self.total is None:
            self.total = share
        else:
            _add(self.total, rows, share)

    def finish(self) -> None:
        assert self.total is not None
        self.d.q[self.rows] = self.total.to(self.d.q.dtype)


def _group_backward(
    plan: _Plan,
    group: Group,
    entering: list[_Entering],
    x: _Operands,
    d: _Operands,
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
        _add(d.k, group.keys, d_k.total)
        _add(d.v, group.keys, d_v.total)
    d_added = _slots_backward(plan, entering, joint, back, d_queries, slots, d_slots)
    d_queries.finish()
    return d_added


def _slots_backward(
    plan: _Plan,
    entering: list[_Entering],
    joint: tuple[Tensor, Tensor, Tensor],
    back: Tensor,
    d_queries: _QueryGradient,
    slots: Slots,
    d_slots: SlotGradients,
) -> Sums:
    """Make the updates and take them back one by one; adds to the gradient of the queries."""
    grad, out, lse = joint
    earlier = [slots.advance(new, at) for _, new, at, _ in entering]
    slots.read_all(entering[0].step.sequences, entering[-1].step.after)
    d_added = Sums(*(_empty_rows(field) for field in zip(*(new for _, new, _, _ in entering), strict=True)))
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
        d_slots.take_back(at, slots.held(at), Sums(*(x[start:end] for x in d_added)))
        slots.restore(at, earlier.pop())
        end = start
    shape = (-1, plan.spec.chunk, slots.keys.shape[1])
    return Sums(*(x.unflatten(0, shape).transpose(1, 2) for x in d_added))


def _empty_rows(updates: Sequence[Tensor]) -> Tensor:
    """Rows for what tokens `[n, G, C, ...]` of several updates added."""
    return updates[0].new_empty(sum(x[..., 0].numel() for x in updates), updates[0].shape[-1])


def _contributions_backward(group: Group, added: Sums, leaves: list[Any], slopes: Sums, d: _Operands) -> None:
    """Add the share of what entered the state."""
    sums, slopes_of = zip(
        *((s, t) for s, t in zip(added, slopes, strict=True) if s.requires_grad), strict=True
    )
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(sums, wanted, slopes_of, allow_unused=True))
    shares: list[Any] = [None if leaf is None else next(found) for leaf in leaves]
    for total, share in zip((d.k, d.v, d.gate), shares, strict=False):
        if share is not None:
            _add(total, group.entering, share)
    d.weight.add_(shares[3])
    d.bias.add_(shares[4])


def _add(total: Tensor | None, rows: Rows, share: Tensor | None) -> None:
    assert total is not None
    assert share is not None
    if isinstance(rows, slice):
        total[rows] += share
    else:
        total.index_add_(0, rows, share.to(total.dtype))


def _sums(tensors: Sequence[Tensor | None]) -> Sums | None:
    """None where there is nothing at all."""
    present = [x for x in tensors if x is not None]
    assert len(present) in (0, 3)
    return Sums(*present) if present else None
