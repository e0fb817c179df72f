"""What the walk over groups of chunks is given, and what enters the slots on the way.

Shapes: R grid rows of queries, or rows entering the state (ordered by update, then by sequence), C tokens of
a chunk, H query heads, G key/value heads, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from .groups import Group
from .routing import Norm, prepare
from .slots import Places, Slots, Sums, contributions, places
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

    def entering(self, group: Group) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """What the group's contributions are made of."""
        gate = None if self.gate is None else self.gate[group.entering]
        return self.k[group.entering], self.v[group.entering], gate, self.weight, self.bias


class Entering(NamedTuple):
    """One update: what its tokens add, `[n, G, C, ...]`, and where."""

    step: Update
    added: Sums
    at: Places
    readers: slice | None
    """Which of the group's queries read the slots it leaves."""


def group_contributions(
    plan: Plan,
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


def group_updates(plan: Plan, group: Group, added: Sums, slot: Tensor) -> list[Entering]:
    """The group's updates; `slot` `[R, G, C]` of all rows that enter."""
    sizes = [step.sequences for step in group.steps]
    each = zip(*(x.split(sizes) for x in added), strict=True)
    ways = slot[group.rows].split(sizes)
    return [
        Entering(step, Sums(*new), places(way, step, plan.size, plan.spec), readers)
        for step, new, way, readers in zip(group.steps, each, ways, group.readers, strict=True)
    ]
