"""The state carried between calls: slots, and the window's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..state import MixerState
from .contributions import Norm, Sums
from .slots import absorbed, read
from .spec import KVMSpec, Update

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
        self.key_sums, self.value_sums, self.radius = absorbed(self.sums(), added, slot, step, spec)
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
