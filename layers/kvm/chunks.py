"""The four steps of KVM attention for many chunks at once, on a grid of chunks.

Routing comes first, for all chunks. The rest goes by groups of updates whose slots take little memory:
accumulate their slots, read them, and let the chunks that see them attend. The backward walks the groups in
reverse and makes their slots again, so nothing of the size of all chunks' slots is ever kept.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base import LayerError
from ..softmax import Part
from ..softmax.grid import ChunkGrid, rows
from ..softmax.joined import Gradient, Joint, part_gradients
from ..softmax.kernels import choose
from .routing import Choice, Norm, Routes, first_slots, prepare, route
from .spec import KVMSpec, Update
from .state import Sums, accumulate, accumulate_backward, contributions, read

GROUP_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Slots of a group, as sums and in read form, take about so many bytes..."""
GROUP_UPDATES = 8
"""... but a group has at least so many updates, as the slots before each group are kept for the backward."""

Queries = tuple[Tensor, Tensor]
"""The queries for window keys and for slots (each with its temperature multiplied in)."""


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
    spec, device = call.spec, k.device
    k_rows, v_rows = grid.keys(k), grid.keys(v)
    entering = rows([s.key(step.number) for step in steps for s in grid.spans[: step.sequences]], device)
    keys = prepare(k_rows[entering], spec.rotary_dim, call.norm).transpose(1, 2)
    gate_rows = None if gate is None else grid.keys(gate)[entering].transpose(1, 2)
    choice = decide(call, keys, gate_rows, steps, None if base is None else base.keys, starts)
    added = contributions(keys, v_rows[entering].transpose(1, 2), gate_rows, choice.founds, steps, spec)
    front, back = (grid.queries(q) for q in queries)
    plan = _Plan(
        spec,
        call.scale,
        choose(front),
        grid.window_parts(spec.window_chunks, device),
        _groups(spec, grid, steps, added, device),
        torch.is_grad_enabled(),
    )
    before = (None, None, None) if base is None else base
    y, window, whole, *last = _Chunks.apply(
        plan, front, back, k_rows, v_rows, choice.slot, *added, *before, *call.norm
    )
    if call.statistics is not None:
        mass = grid.tokens_of((1 - torch.exp(window - whole)).transpose(1, 2))
        numbers = [max(s.end - 1 - spec.window_chunks, 0) for s in grid.spans]
        after = {step.number: step.after for step in steps}
        slots = sum(after[number] for number in numbers)
        call.note(slots / len(numbers), sum(n + 1 for n in numbers) * spec.chunk / len(numbers), mass)
    return grid.tokens_of(y), choice, Sums(*last)


def decide(
    call: Call,
    keys: Tensor,
    gate: Tensor | None,
    steps: Sequence[Update],
    base: Tensor | None,
    starts: list[tuple[int, int]],
) -> Choice:
    """Where the steps' tokens go: routed, or as given. `keys` are prepared, `[R, G, C, D]`."""
    if call.replay is None:
        return route(keys, gate, steps, call.spec, call.norm, base, call.margins)
    found = []
    for step in steps:
        if step.number == 0:
            found.append(first_slots(keys[: step.sequences]))
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
class _Group:
    """Updates whose slots exist at the same time."""

    steps: list[Update]
    rows: slice  # among all rows that enter the state
    parts: list[Part]  # queries of the grid over the group's slots


@dataclass(frozen=True)
class _Plan:
    spec: KVMSpec
    scale: float
    kernel: str
    window: list[Part]
    groups: list[_Group]
    differentiable: bool


def _groups(
    spec: KVMSpec, grid: ChunkGrid, steps: list[Update], added: Sums, device: torch.device
) -> list[_Group]:
    heads, size = added.keys.shape[1], added.keys.shape[3]
    slot = 2 * heads * (2 * size + 1) * added.keys.element_size()
    limit = GROUP_BYTES["cpu" if device.type == "cpu" else "cuda"]
    bundles: list[list[Update]] = [[]]
    for step in steps:
        last = bundles[-1]
        full = sum(s.sequences for s in (*last, step)) * step.after * slot > limit
        if full and len(last) >= GROUP_UPDATES:
            bundles.append([step])
        else:
            last.append(step)
    groups, row = [], 0
    for bundle in bundles:
        count = sum(step.sequences for step in bundle)
        parts = _slot_parts(spec, grid, bundle, device)
        groups.append(_Group(bundle, slice(row, row + count), parts))
        row += count
    return groups


def _slot_parts(spec: KVMSpec, grid: ChunkGrid, steps: list[Update], device: torch.device) -> list[Part]:
    """Chunks over their slots; successive updates that leave equally many slots make one part."""
    runs: list[tuple[int, int, list[int]]] = []  # slots, first row of slots, query rows
    row = 0
    for step in steps:
        reader = step.number + spec.window_chunks
        readers = [s.query(reader) for s in grid.spans[: step.sequences] if s.first <= reader < s.end]
        if readers and runs and runs[-1][0] == step.after:
            runs[-1][2].extend(readers)
        elif readers:
            runs.append((step.after, row, readers))
        row += step.sequences
    return [
        Part(rows(readers, device), k_rows=slice(first, first + len(readers)), k_tokens=slice(0, slots))
        for slots, first, readers in runs
    ]


class _Chunks(torch.autograd.Function):
    """Steps 2 to 4, with the backward of the whole."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, front: Tensor, back: Tensor, k: Tensor, v: Tensor, slot: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:
        """`more`: added sums, base sums (or None), and the norm's weight and bias.

        Returns heads `[R, C, H, D]`, log-sum-exp `[R, H, C]` over the window and over all keys, and the slots
        after the last update.
        """
        added, before, norm = Sums(*more[:3]), _sums(more[3:6]), Norm(*more[6:])
        joint = Joint(front)
        joint.add(plan.kernel, [front], [k], [v], plan.window, plan.scale)
        window = joint.lse.clone()
        kept = []
        for group in plan.groups:
            if plan.differentiable:
                kept.append(before)
            here = added.select(group.rows)
            states = accumulate(here, slot[group.rows], group.steps, plan.spec, before)
            if group.parts:
                keys, values = (x.transpose(1, 2) for x in read(states, norm, plan.spec, k.dtype))
                joint.add(plan.kernel, [back], [keys], [values], group.parts, plan.scale)
            before = _ending(states, group.steps)
        y, lse = joint.result()
        starts = [x for sums in kept if sums for x in sums]
        ctx.save_for_backward(front, back, k, v, slot, y, lse, *added, *norm, *starts)
        ctx.plan, ctx.has_base = plan, more[3] is not None
        ctx.mark_non_differentiable(window, lse)
        ctx.set_materialize_grads(False)
        assert before is not None
        return y, window, lse, *before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _window: Any, _lse: Any, *grad_last: Any) -> tuple[Any, ...]:
        plan: _Plan = ctx.plan
        front, back, k, v, slot, y, lse, *more = ctx.saved_tensors
        added, norm, kept = Sums(*more[:3]), Norm(*more[3:5]), list(more[5:])
        if grad is None:
            grad = torch.zeros_like(y)
        joint = (grad, y, lse)
        d_front, d_back, d_k, d_v = (Gradient(x) for x in (front, back, k, v))
        part_gradients(
            plan.kernel, joint, [front], [k], [v], plan.window, plan.scale, ([d_front], [d_k], [d_v])
        )
        d_norm = [torch.zeros_like(x) for x in norm]
        d_added: list[Sums] = []
        carry = _sums(grad_last)
        for group in reversed(plan.groups):
            before = Sums(*kept[-3:]) if kept else None
            del kept[-3:]
            here = slot[group.rows]
            states = accumulate(added.select(group.rows), here, group.steps, plan.spec, before)
            d_states = _read_backward(plan, group, states, norm, joint, back, d_back, d_norm)
            d_here, carry = accumulate_backward(d_states, here, group.steps, plan.spec, before, carry)
            d_added.append(d_here)
        d_more = [torch.cat(x) for x in zip(*reversed(d_added), strict=True)]
        base = carry if ctx.has_base and carry is not None else (None, None, None)
        operands = (x.result() for x in (d_front, d_back, d_k, d_v))
        return None, *operands, None, *d_more, *base, *d_norm


def _read_backward(
    plan: _Plan,
    group: _Group,
    states: Sums,
    norm: Norm,
    joint: tuple[Tensor, Tensor, Tensor],
    back: Tensor,
    d_back: Gradient,
    d_norm: list[Tensor],
) -> Sums:
    """Gradients of a group's sums through reading and attending; adds to the queries' and the norm's."""
    if not group.parts:
        return Sums(*(torch.zeros_like(x) for x in states))
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*states, *norm)]
        keys, values = read(Sums(*leaves[:3]), Norm(*leaves[3:]), plan.spec, back.dtype)
    seen = [x.detach().transpose(1, 2) for x in (keys, values)]
    d_keys, d_values = Gradient(seen[0]), Gradient(seen[1])
    part_gradients(
        plan.kernel,
        joint,
        [back],
        seen[:1],
        seen[1:],
        group.parts,
        plan.scale,
        ([d_back], [d_keys], [d_values]),
    )
    heads_first = [x.result().transpose(1, 2) for x in (d_keys, d_values)]
    *d_states, d_weight, d_bias = torch.autograd.grad((keys, values), leaves, heads_first)
    d_norm[0] += d_weight
    d_norm[1] += d_bias
    return Sums(*d_states)


def _sums(tensors: Sequence[Tensor | None]) -> Sums | None:
    """None where there is nothing at all."""
    present = [x for x in tensors if x is not None]
    assert len(present) in (0, 3)
    return Sums(*present) if present else None


def _ending(states: Sums, steps: Sequence[Update]) -> Sums:
    """The slots after the last of `steps`."""
    last = slice(len(states.keys) - steps[-1].sequences, None)
    return Sums(*(x.clone() for x in states.select(last)))
