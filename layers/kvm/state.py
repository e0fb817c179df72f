"""Steps 2 and 3 of KVM attention, `accumulate` and `read`, and the state carried between calls.

A slot's sum after an update is a prefix sum, over updates, of the tokens routed to it. So the states of many
updates are a running sum that tokens are added to, and their backward is that sum reversed and a gather.

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
        parts.append(Sums(gated_keys, gated_values, radius))
    return parts[0] if len(parts) == 1 else Sums(*(torch.cat(x) for x in zip(*parts, strict=True)))


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
    indices = _places(slot_RGC, steps, spec)
    return Sums(
        *(
            _accumulate(x, index, steps, None if before is None else before[i])
            for i, (x, index) in enumerate(zip(added, indices, strict=True))
        )
    )


def accumulate_backward(
    grad: Sums,
    slot_RGC: Tensor,
    steps: Sequence[Update],
    spec: KVMSpec,
    before: Sums | None,
    grad_last: Sums | None,
) -> tuple[Sums, Sums | None]:
    """Gradients of `added` and `before`, given those of the result (`grad`, which is overwritten) and of the
    slots after the last step, as used elsewhere (`grad_last`)."""
    rows, heads, chunk = slot_RGC.shape
    added: list[Tensor] = []
    first: list[Tensor] = []
    for i, index in enumerate(_places(slot_RGC, steps, spec)):
        states = grad[i].contiguous()
        blocks = list(states.split([step.sequences for step in steps]))
        if grad_last is not None:
            blocks[-1][: len(grad_last[i])] += grad_last[i]
        for this, after in pairwise(reversed(blocks)):
            after[: len(this)] += this
        size = states.shape[-1]
        tokens = states.view(-1, size).index_select(0, index)
        added.append(tokens.view(rows, chunk, heads, size).transpose(1, 2))
        if before is not None:
            first.append(blocks[0][:, :, : before[i].shape[2]])
    return Sums(*added), Sums(*first) if first else None


def _places(slot_RGC: Tensor, steps: Sequence[Update], spec: KVMSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Row of each token in the flattened states `[R * G * S, ...]`, for keys, values and radii; tokens in the
    order `[R, C, G]`, which keys and values have in memory."""
    rows, heads, chunk = slot_RGC.shape
    first = torch.arange(rows * heads, device=slot_RGC.device).view(rows, 1, heads) * steps[-1].after
    place = (slot_RGC.transpose(1, 2) + first).flatten()
    if spec.values != "reference_counts":
        return place, place, place
    # The public code's rule: each update adds 1 to every slot, of which there are as many as tokens.
    return place, place, (torch.arange(chunk, device=slot_RGC.device)[:, None] + first).flatten()


def _accumulate(added: Tensor, place: Tensor, steps: Sequence[Update], before: Tensor | None) -> Tensor:
    """Copy the slots from update to update (the rows of one are the first sequences of the one before) and
    add each one's tokens."""
    rows, heads, chunk, size = added.shape
    states = added.new_empty(rows, heads, steps[-1].after, size)
    tokens = added.transpose(1, 2).flatten(0, 2)
    start = 0
    for step in steps:
        end = start + step.sequences
        here = states[start:end]
        held = 0 if before is None else before.shape[2]
        if before is not None:
            here[:, :, :held] = before[: step.sequences]
        if held < here.shape[2]:
            here[:, :, held:] = 0
        span = slice(start * heads * chunk, end * heads * chunk)
        states.view(-1, size).index_add_(0, place[span], tokens[span])
        before, start = here, end
    return states


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
        keys, values, radius = sums
        return cls(0, 0, 0, keys, values, radius, window[0], window[1], gate)

    def tensors(self) -> dict[str, Tensor]:
        return {
            name: tensor.narrow(axis, 0, self._used(axis))
            for name, axis in _AXIS.items()
            if (tensor := getattr(self, name)) is not None
        }

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        self._refuse_spent()
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
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
        self.key_sums, self.value_sums, self.radius = accumulate(added, slot, [step], spec, self.sums())
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
