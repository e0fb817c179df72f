"""What the walk over groups of chunks is given, and what enters the slots on the way.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from .contributions import Norm, Sums, contributions, prepare
from .groups import Group
from .routing import Choice
from .slots import Places, Slots, places
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
class Plan:
    spec: KVMSpec
    scale: float
    kernel: str
    groups: list[Group]
    differentiable: bool
    statistics: bool
    decide: Callable[[Tensor, Tensor | None, Tensor, Update], Choice]
    """Where an update's tokens go, given their prepared keys, their gates, and the slots' keys."""

    @property
    def size(self) -> int:
        """Slots after the last update."""
        return self.groups[-1].steps[-1].after

    def slots(self, x: Operands) -> Slots:
        """Empty ones."""
        heads, dim = x.k.shape[2:]
        shape = (self.groups[0].steps[0].sequences, heads, self.size, dim)
        return Slots(shape, x.norm, self.spec, x.k.dtype)


class Operands(NamedTuple):
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

    def entering(self, group: Group) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and gates that enter the state."""
        gate = None if self.gate is None else self.gate[group.entering]
        return self.k[group.entering], self.v[group.entering], gate


class Entering(NamedTuple):
    """One update: what its tokens add, `[n, G, C, ...]`, and where."""

    step: Update
    added: Sums
    at: Places
    readers: slice | None
    """Which of the group's queries read the slots it leaves."""


def decided_updates(plan: Plan, group: Group, x: Operands, slots: Slots) -> Iterator[tuple[Choice, Entering]]:
    """The group's updates, each decided on with the slots as they are when it is asked for."""
    k, v, gate = x.entering(group)
    sizes = [step.sequences for step in group.steps]
    keys = prepare(k, plan.spec.rotary_dim, x.norm).transpose(1, 2).split(sizes)
    values = v.transpose(1, 2).split(sizes)
    gates = [None] * len(sizes) if gate is None else gate.transpose(1, 2).split(sizes)
    for step, readers, own_k, own_v, own_gate in zip(
        group.steps, group.readers, keys, values, gates, strict=True
    ):
        choice = plan.decide(own_k, own_gate, slots.routable(step.sequences, step.before), step)
        added = contributions(own_k, own_v, own_gate, choice.founds, [step], plan.spec)
        yield choice, Entering(step, added, places(choice.slot, step, plan.size, plan.spec), readers)


def group_updates(plan: Plan, group: Group, added: Sums, slot: Tensor) -> list[Entering]:
    """The group's updates; `slot` `[R, G, C]`."""
    sizes = [step.sequences for step in group.steps]
    each = zip(*(x.split(sizes) for x in added), strict=True)
    return [
        Entering(step, Sums(*new), places(way, step, plan.size, plan.spec), readers)
        for step, new, way, readers in zip(group.steps, each, slot.split(sizes), group.readers, strict=True)
    ]
