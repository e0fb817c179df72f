"""Steps 2 and 3 of KVM attention, `accumulate` and `read`, and the state carried between calls.

A slot's sum after an update is a prefix sum, over updates, of the tokens routed to it. So the states of many
updates are one scatter and a running sum, and their backward is the running sum reversed and a gather.

Shapes: R rows (chunks entering the state, ordered by update, then by sequence), G key/value heads, C tokens
of a chunk, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base import MixerState
from .routing import Norm, key_weight, value_weight
from .spec import KVMSpec, Update


class Sums(NamedTuple):
    """Keys, values and radii (or counts) of slots, `[..., S, D]` twice and `[..., S, 1]`, in at least fp32;
    also what single tokens add to them."""

    keys: Tensor
    values: Tensor
    radius: Tensor

    def select(self, index: Any) -> Sums:
        return Sums(*(x[index] for x in self))


def contributions(
    keys_RGCD: Tensor,
    values_RGCD: Tensor,
    gate_RGC: Tensor | None,
    founds_RGC: Tensor,
    steps: Sequence[Update],
    spec: KVMSpec,
) -> Sums:
    """What every token adds to its slot (spec sections 3 and 4); `keys` are prepared keys."""
    initial = steps[0].sequences if steps[0].number == 0 else 0
    parts = []
    for rows, number in ((slice(0, initial), 0), (slice(initial, None), 1)):
        keys, values, own = keys_RGCD[rows], values_RGCD[rows].to(keys_RGCD.dtype), founds_RGC[rows]
        if not len(keys):
            continue
        gate = None if gate_RGC is None else gate_RGC[rows]
        gated_keys = _times(keys, key_weight(spec, number, own, gate))
        gated_values = _times(values, value_weight(spec, number, own, gate))
        if spec.values == "radius":
            # Merges leave the radius alone. The initial state's is that of the ungated value.
            length = torch.linalg.vector_norm(gated_values if number else values, dim=-1, keepdim=True)
            radius = length * own[..., None]
        else:
            radius = torch.ones_like(values[..., :1])
        parts.append((gated_keys, gated_values, radius))
    return Sums(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight[..., None]


def accumulate(
    added: Sums, slot_RGC: Tensor, steps: Sequence[Update], spec: KVMSpec, before: Sums | None
) -> Sums:
    """The slots `[R, G, S, ...]` after each of `steps`, S being the number after the last one; slots that do
    not exist yet are 0.

    Args:
        added: what each token adds, `[R, G, C, ...]`.
        before: the slots before the first step, `[sequences, G, S, ...]`; None when there are none.
    """
    counts = [step.sequences for step in steps]
    slots = steps[-1].after
    rows, heads, chunk = slot_RGC.shape
    first = torch.arange(rows * heads, device=slot_RGC.device).view(rows, heads, 1) * slots
    index = (slot_RGC + first).flatten()
    index_radius = index
    if spec.values == "reference_counts":
        # The public code's rule: each update adds 1 to every slot, of which there are as many as tokens.
        index_radius = (torch.arange(chunk, device=slot_RGC.device) + first).flatten()
    old = before or (None, None, None)
    return Sums(
        _Accumulate.apply(added.keys, old[0], index, counts, slots),
        _Accumulate.apply(added.values, old[1], index, counts, slots),
        _Accumulate.apply(added.radius, old[2], index_radius, counts, slots),
    )


class _Accumulate(torch.autograd.Function):
    """Scatter rows of tokens into slots, then add up over updates. The rows of an update are the first
    sequences of the update before."""

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, before: Tensor | None, index: Tensor, counts: list[int], slots: int
    ) -> Tensor:
        rows, heads, _, size = added.shape
        states = added.new_zeros(rows, heads, slots, size)
        states.view(-1, size).index_add_(0, index, added.reshape(-1, size))
        blocks = states.split(counts)
        if before is not None:
            blocks[0][:, :, : before.shape[2]] += before
        for last, this in pairwise(blocks):
            this += last[: len(this)]
        ctx.save_for_backward(index)
        ctx.counts, ctx.shape = counts, added.shape
        ctx.slots_before = None if before is None else before.shape[2]
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)
        blocks = grad.split(ctx.counts)
        for this, after in zip(reversed(blocks[:-1]), reversed(blocks[1:]), strict=True):
            this[: len(after)] += after
        added = grad.view(-1, grad.shape[-1]).index_select(0, index).view(ctx.shape)
        before = None if ctx.slots_before is None else blocks[0][:, :, : ctx.slots_before]
        return added, before, None, None, None


def read(sums: Sums, norm: Norm, spec: KVMSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., S, D]` that queries meet, in `dtype`; computed in the sums' own precision."""
    keys = norm(sums.keys)
    if spec.values == "radius":
        length = torch.linalg.vector_norm(sums.values, dim=-1, keepdim=True)
        values = sums.values * (sums.radius / length.clamp_min(1e-12))
    else:
        values = sums.values / sums.radius.clamp_min(1)  # a slot that exists counts at least 1
    return keys.to(dtype), values.to(dtype)


_AXIS = {"key_sums": 2, "value_sums": 2, "radius": 2, "window_k": 1, "window_v": 1, "window_gate": 1}


@dataclass
class KVMState(MixerState):
    """Slots and window after `position` tokens.

    The slots hold tokens from 0 up to the window's start, and at least the first chunk (while also in the
    window). An update that the next token calls for has not been made yet.

    Tensors may be buffers longer than what is used; `tensors()` shows the used part. Without gradients a call
    writes into buffers that this state's own earlier calls made.
    """

    slots: int = 0
    held: int = 0
    """Tokens in the window."""
    key_sums: Tensor | None = None  # [B, G, S, D], fp32 or wider
    value_sums: Tensor | None = None  # [B, G, S, D]
    radius: Tensor | None = None  # [B, G, S, 1]: radii, or counts
    window_k: Tensor | None = None  # [B, W, G, D], normalised and rotated
    window_v: Tensor | None = None  # [B, W, G, D]
    window_gate: Tensor | None = None  # [B, W, G]; None: no gates
    _owned: frozenset[str] = field(default=frozenset(), repr=False, compare=False, kw_only=True)
    _read: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False, kw_only=True)

    @classmethod
    def empty(cls, k: Tensor, gated: bool) -> KVMState:
        """Before the first token, for keys like `k` `[B, *, G, D]`."""
        batch, _, heads, size = k.shape
        wide = torch.promote_types(k.dtype, torch.float32)
        sums = [k.new_zeros(batch, heads, 0, s, dtype=wide) for s in (size, size, 1)]
        window = [k.new_zeros(batch, 0, heads, size) for _ in range(2)]
        gate = k.new_zeros(batch, 0, heads, dtype=wide) if gated else None
        return cls(0, 0, 0, *sums, *window, gate)

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor.narrow(axis, 0, self._used(axis))
            for name, axis in _AXIS.items()
            if (tensor := getattr(self, name)) is not None
        }

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        self._refuse_spent()
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed, _owned=frozenset(), _read=None)

    def sums(self) -> Sums:
        tensors = self.tensors()
        return Sums(tensors["key_sums"], tensors["value_sums"], tensors["radius"])

    def read(self, norm: Norm, spec: KVMSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As the function `read`; without gradients the result is kept until the slots change."""
        if torch.is_grad_enabled():
            return read(self.sums(), norm, spec, dtype)
        if self._read is None or self._read[0].dtype != dtype:
            self._read = read(self.sums(), norm, spec, dtype)
        return self._read

    def push(self, k: Tensor, v: Tensor, gate: Tensor | None) -> None:
        """Append tokens `[B, T, ...]` to the window."""
        for name, new in (("window_k", k), ("window_v", v), ("window_gate", gate)):
            if new is not None:
                self._append(name, new)
        self.held += k.shape[1]
        self.position += k.shape[1]

    def found(self, added: Sums) -> None:
        """Append slots, one for each token of `added`."""
        for name, new in zip(("key_sums", "value_sums", "radius"), added, strict=True):
            self._append(name, new)
        self.slots += added.keys.shape[2]
        self._read = None

    def absorb(self, added: Sums, slot: Tensor, step: Update, spec: KVMSpec) -> None:
        """Make one update of the slots."""
        sums = accumulate(added, slot, [step], spec, self.sums())
        self.key_sums, self.value_sums, self.radius = sums
        self.slots = step.after
        self._owned -= {"key_sums", "value_sums", "radius"}
        self._read = None

    def oldest(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and gates of the window's first `count` tokens."""
        gate = None if self.window_gate is None else self.window_gate[:, :count]
        assert self.window_k is not None
        assert self.window_v is not None
        return self.window_k[:, :count], self.window_v[:, :count], gate

    def drop(self, count: int) -> None:
        """Remove the window's first `count` tokens."""
        for name in ("window_k", "window_v", "window_gate"):
            buffer = getattr(self, name)
            if buffer is None:
                continue
            kept = buffer[:, count : self.held]
            if self._writable(name):
                buffer[:, : kept.shape[1]] = kept.clone()
            else:
                setattr(self, name, kept)
        self.held -= count

    def _used(self, axis: int) -> int:
        return self.slots if axis == 2 else self.held

    def _writable(self, name: str) -> bool:
        buffer = getattr(self, name)
        stale = buffer.is_inference() and not torch.is_inference_mode_enabled()
        return name in self._owned and not stale and not torch.is_grad_enabled()

    def _append(self, name: str, new: Tensor) -> None:
        axis = _AXIS[name]
        used, more = self._used(axis), new.shape[axis]
        buffer = getattr(self, name)
        old = buffer.narrow(axis, 0, used)
        if torch.is_grad_enabled():
            setattr(self, name, torch.cat((old, new.to(buffer.dtype)), axis))
            self._owned -= {name}
            return
        if not self._writable(name) or used + more > buffer.shape[axis]:
            shape = list(buffer.shape)
            shape[axis] = 2 * (used + more)
            buffer = buffer.new_empty(shape)
            buffer.narrow(axis, 0, used).copy_(old)
            setattr(self, name, buffer)
            self._owned |= {name}
        buffer.narrow(axis, used, more).copy_(new)
