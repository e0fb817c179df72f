"""What mixers around a linear recurrence have in common: a state of fixed size, and so their counts."""

from __future__ import annotations

from ..base import Flops, Mixer


class RecurrentMixer(Mixer):
    """Base of mixers whose state is `recurrent`, and the last inputs of token shifts or short convolutions.

    A token's FLOPs do not depend on its position: `flops_at` counts the recurrence token by token. The
    chunked form does other products, of about the same size; convolutions have none.
    """

    position_free = True

    def transition_numbers(self) -> int:
        """Count the numbers of the transition that ranks exchange beside end states (see `across`)."""
        raise NotImplementedError

    def flops_per_token(self, context_length: int) -> Flops:
        return self.flops_at(0)

    def state_bytes(self, context_length: int, element_size: int = 4) -> int:
        held = self.empty_state(1).tensors()
        recurrent = held.pop("recurrent").numel() * max(element_size, 4)
        return recurrent + sum(x.numel() for x in held.values()) * element_size

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Count the bytes of a forward pass: every rank sends all later ones its end state and transition, in
        at least fp32, and the next one the inputs that its token shifts or convolutions see (a convolution
        one less than its state holds)."""
        held = self.empty_state(1).tensors()
        numbers = held.pop("recurrent").numel() + self.transition_numbers()
        seen = sum((x if x.ndim == 2 else x[..., 1:]).numel() for x in held.values())
        return rows * (size - 1) * (size * numbers * max(element_size, 4) // 2 + seen * element_size)
