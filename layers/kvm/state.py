"""The state carried between calls: slots, and the window's tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from ..buffers import GrowingBuffer, is_frozen
from ..state import MixerState
from .contributions import Norm, Sums, Tokens
from .slots import Slots
from .spec import KVMSpec


@dataclass
class KVMState(MixerState):
    """Slots and window after `position` tokens.

    The slots hold tokens from 0 up to the window's start, and at least the first chunk (while also in the
    window). An update that the next token calls for has not been made yet.

    Without gradients the tensors lie in buffers that later calls write into.
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
    _slots: Slots | None = field(default=None, init=False, repr=False, compare=False)
    _window: list[GrowingBuffer] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def empty(cls, k: Tensor, gated: bool) -> KVMState:
        """Make the state before the first token, for keys like `k` `[B, *, G, D]`."""
        batch, _, heads, size = k.shape
        wide = torch.promote_types(k.dtype, torch.float32)
        key_sums, value_sums, radius = (k.new_empty(batch, heads, 0, s, dtype=wide) for s in (size, size, 1))
        keys, values = (k.new_empty(batch, 0, heads, size) for _ in range(2))
        gate = k.new_empty(batch, 0, heads, dtype=wide) if gated else None
        return cls(0, 0, 0, key_sums, value_sums, radius, keys, values, gate)

    def take(self) -> Self:
        taken = super().take()
        if not torch.is_grad_enabled():  # any other copy does without: its tensors do not lie in the buffers
            taken._slots, taken._window = self._slots, self._window
        return taken

    def sums(self) -> Sums:
        assert self.key_sums is not None
        assert self.value_sums is not None
        assert self.radius is not None
        return Sums(self.key_sums, self.value_sums, self.radius)

    def window(self) -> Tokens:
        assert self.window_k is not None
        assert self.window_v is not None
        return Tokens(self.window_k, self.window_v, self.window_gate)

    def slots_for(self, room: int | None, norm: Norm, spec: KVMSpec, dtype: torch.dtype) -> Slots:
        """Return slots for a call to change (`room` None: to replace), read in `dtype`: without gradients
        those of the last call."""
        own = self._slots
        if torch.is_grad_enabled() or own is None or own.dtype != dtype or is_frozen(own.sums.keys):
            return Slots(self.sums(), room, norm, spec, dtype)
        own.norm = norm
        own.reserve(room or 0)
        return own

    def followed_by(self, new: Tokens, in_place: bool) -> Tokens:
        """Return the window's tokens and new ones; `in_place`: in buffers, if there are no gradients."""
        held = self.window()
        if held.k.dtype != new.k.dtype:
            held = Tokens(held.k.to(new.k.dtype), held.v.to(new.k.dtype), held.gate)
            self._window = None
        in_place = in_place and not torch.is_grad_enabled()
        buffers = self._window = (self._window or [GrowingBuffer() for _ in new]) if in_place else None

        def joined(a: Tensor, b: Tensor, place: int) -> Tensor:
            if buffers is not None:
                return buffers[place].append(a, b)
            return torch.cat((a, b), 1) if a.shape[1] else b

        gate = None if held.gate is None or new.gate is None else joined(held.gate, new.gate, 2)
        return Tokens(joined(held.k, new.k, 0), joined(held.v, new.v, 1), gate)

    def last_tokens(self, tokens: Tokens, count: int) -> Tokens:
        """Return the last of the tokens that `followed_by` gave, not keeping the others' memory."""
        if self._window is None:
            return tokens.map(lambda x: x[:, x.shape[1] - count :].clone())
        k, v, gate = self._window
        return Tokens(
            k.keep_last(count), v.keep_last(count), None if tokens.gate is None else gate.keep_last(count)
        )
