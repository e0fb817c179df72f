"""KVM attention for many chunks at once, on a grid of chunks.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import LayerError
from ..softmax.grid import ChunkGrid
from ..softmax.kernels import choose
from .contributions import Norm, Sums
from .groups import groups
from .operands import Operands, Plan, Queries
from .routing import Choice, Routes, first_slots, route
from .spec import KVMSpec, Update
from .walk import Walk


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
    differentiable, statistics = torch.is_grad_enabled(), call.statistics is not None
    decided = partial(decide, call, starts)
    plan = Plan(spec, call.scale, choose(q), walk, differentiable, statistics, decided)
    operands = Operands(q, k, v, gate, queries.front, queries.back, *call.norm)
    before = (None, None, None) if base is None else base
    y, slot, founds, margin, window, whole, *last = Walk.apply(plan, *operands, *before)
    if call.statistics is not None:
        mass = grid.tokens_of((1 - torch.exp(window - whole)).transpose(1, 2))
        numbers = [max(s.end - 1 - spec.window_chunks, 0) for s in grid.spans]
        after = {step.number: step.after for step in steps}
        slots = sum(after[number] for number in numbers)
        call.note(slots / len(numbers), sum(n + 1 for n in numbers) * spec.chunk / len(numbers), mass)
    return grid.tokens_of(y), Choice(slot, founds, margin), Sums(*last)


@torch.no_grad()
def decide(
    call: Call,
    starts: list[tuple[int, int]],
    keys: Tensor,
    gate: Tensor | None,
    old: Tensor,
    step: Update,
) -> Choice:
    """Where one update's tokens go: routed, or as given (their `starts` are those of `on_grid`).

    Other arguments are those of `route`.
    """
    if step.number == 0:
        return first_slots(keys, margins=call.margins and call.replay is None)
    if call.replay is None:
        return route(keys, gate, old, step, call.spec, call.norm, call.margins)
    first = step.number * call.spec.chunk
    given = [_given(call.replay, b, start + first, call.spec.chunk) for b, start in starts[: step.sequences]]
    return Choice(torch.cat([c.slot for c in given]), torch.cat([c.founds for c in given]))


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
