"""How many slots a KVM state has once so many tokens have been seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import LayerError, is_count, require

MODES = ("fixed", "power_law", "saturation")


@dataclass(frozen=True)
class Budget:
    """The wanted number of slots as a function of the context length t (tokens seen, window included).

    fixed: `minimum`; power_law: `factor * t ** exponent`; saturation: `n t / (n + t)` with n = `saturation`.
    The latter two are rounded down to a multiple of `round_to` and are at least `minimum`. A state starts
    with a chunk of slots, gains at most one chunk of slots per update and never shrinks.
    """

    mode: str = "fixed"
    minimum: int = 1
    factor: float = 1.0
    exponent: float = 0.5
    saturation: int | None = None
    round_to: int = 1
    max_chunks: int | None = None
    """At most so many chunks of slots; None: no such cap."""

    def __post_init__(self) -> None:
        require(self.mode in MODES, "budget mode", self.mode, ", ".join(MODES))
        require(is_count(self.round_to), "budget round_to", self.round_to, "a whole number of 1 or more")
        require(isinstance(self.minimum, int), "budget minimum", self.minimum, "a whole number")
        cap = self.max_chunks
        require(
            cap is None or is_count(cap), "budget max_chunks", cap, "a whole number of 1 or more, or null"
        )
        if self.mode == "power_law":
            require(0 < self.factor < math.inf, "budget factor", self.factor, "a number above 0")
            require(0 <= self.exponent <= 1, "budget exponent", self.exponent, "a number from 0 to 1")
        if self.mode == "saturation" and not is_count(self.saturation):
            raise LayerError(
                f"budget saturation is {self.saturation!r}; mode saturation needs the limit, 1 or more"
            )

    def wanted(self, context: int) -> int:
        """Slots wanted at context length `context`, before any cap (spec section 4; float64 arithmetic)."""
        if self.mode == "fixed":
            return self.minimum
        if self.mode == "power_law":
            slots = math.floor(self.factor * context**self.exponent)
        else:
            assert self.saturation is not None
            slots = math.floor(self.saturation * context / (self.saturation + context))
        return max(self.minimum, slots // self.round_to * self.round_to)

    def grown(self, slots: int, context: int, absorbed: int, chunk: int) -> int:
        """Slots after an update at context length `context` that had `slots` slots before it.

        `absorbed` tokens have then left the window; `chunk` is the number of tokens the update absorbs.
        """
        caps = [self.wanted(context), absorbed]
        if self.max_chunks is not None:
            caps.append(chunk * self.max_chunks)
        return min(max(min(caps), slots), slots + chunk)
