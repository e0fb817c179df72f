"""What a mixer remembers between calls: tensors with one entry per sequence, and numbers on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from .errors import LayerError

S = TypeVar("S", bound="MixerState")


@dataclass
class MixerState:
    """State of a mixer between calls: tensors whose first axis is the batch, and numbers on the host.

    With gradients enabled a state is a value: calls leave it alone and it is differentiable. Without, a
    call takes its storage over, so that decoding writes in place; a state that was handed on is spent.
    """

    position: int = 0
    """Tokens seen since the start of the sequence."""
    _spent: bool = field(default=False, repr=False, kw_only=True)
    _maker: dict[str, Any] | None = field(default=None, repr=False, compare=False, kw_only=True)
    """`Mixer._facts` of the layer that made it; None where that is not known."""

    def tensors(self) -> dict[str, Tensor]:
        """Collect every tensor by field name; a state inside this one has dotted names (`inner.field`)."""
        found: dict[str, Tensor] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = value
            elif isinstance(value, MixerState):
                found.update({f"{f.name}.{name}": tensor for name, tensor in value.tensors().items()})
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply `change` to every tensor; give the changed state."""
        self._refuse_spent()
        changed: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = change(value)
            elif isinstance(value, MixerState):
                changed[f.name] = value.map(change)
        return replace(self, **changed)

    def select(self, rows: Sequence[int] | slice) -> Self:
        """Pick sequences of the batch, in that order; repeats are allowed. A slice gives views, numbers an
        independent state."""
        index = rows if isinstance(rows, slice) else list(rows)
        return self.map(lambda t: t[index])

    @staticmethod
    def concatenate(states: Sequence[S]) -> S:
        """Join `states`, which differ in nothing but their tensors' values, to the state of one batch."""
        tensors = [state.tensors() for state in states]
        joined = iter([torch.cat([own[name] for own in tensors]) for name in tensors[0]])
        return states[0].map(lambda _: next(joined))  # which goes by the order of `tensors`

    def detach(self) -> Self:
        return self.map(lambda t: t.detach())

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda t: t.to(device))

    def fork(self) -> Self:
        """Copy the state; both can be continued."""
        return self.map(lambda t: t.clone())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def refuse_batch(self, batch: int) -> None:
        """Raise LayerError unless the state is of `batch` sequences."""
        sizes = {tensor.shape[0] for tensor in self.tensors().values()} - {batch}
        if sizes:
            raise LayerError(f"the state holds {sizes.pop()} sequences, the call has {batch}")

    def take(self) -> Self:
        """Give a call the state to go on from; without gradients this spends the caller's copy.

        Raises LayerError when the state was already handed on.
        """
        self._refuse_spent()
        if torch.is_grad_enabled():
            made_without = any(t.is_inference() for t in self.tensors().values())
            return self.fork() if made_without else self  # no backward takes inference mode's tensors
        taken = replace(self)
        self._spent = True
        return taken

    def _refuse_spent(self) -> None:
        if self._spent:
            raise LayerError(
                "this state was handed on to an earlier call, which may have overwritten it; "
                "use the state that call returned, or fork() before calling"
            )
