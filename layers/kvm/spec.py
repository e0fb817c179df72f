"""Settings of the KVM operator, the number of slots at every length, and the timetable of updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from ..errors import LayerError, is_count, require

VALUE_RULES = ("radius", "counts", "reference_counts")
MODES = ("fixed", "power_law", "saturation")


@dataclass(frozen=True)
class Budget:
    """The wanted number of slots as a function of the context length t (tokens seen, window included).

    fixed: `minimum`; power_law: `factor * t ** exponent`; saturation: `n t / (n + t)` with n = `saturation`.
    The latter two are rounded down to a multiple of `round_to` and are at least `minimum`. A state starts
    with a chunk of slots, gains at most one chunk of slots per update and never shrinks. LayerError names a
    setting out of range as the recipe does.
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
        whole = "a whole number of 1 or more"
        require(self.mode in MODES, "budget", self.mode, ", ".join(MODES))
        require(is_count(self.round_to), "budget_round", self.round_to, whole)
        require(isinstance(self.minimum, int), "budget_minimum", self.minimum, "a whole number")
        cap, limit, factor, power = self.max_chunks, self.saturation, self.factor, self.exponent
        require(cap is None or is_count(cap), "budget_max_chunks", cap, f"{whole}, or null")
        require(_is_number(factor) and factor > 0, "budget_factor", factor, "a number above 0")
        require(_is_number(power) and 0 <= power <= 1, "budget_exponent", power, "a number from 0 to 1")
        needed = is_count(limit) or (limit is None and self.mode != "saturation")
        require(needed, "budget_saturation", limit, whole)

    def wanted(self, context: int) -> int:
        """Count the slots wanted at a context length, before any cap (spec section 4; float64 arithmetic)."""
        if self.mode == "fixed":
            return self.minimum
        if self.mode == "power_law":
            slots = math.floor(self.factor * context**self.exponent)
        else:
            assert self.saturation is not None
            slots = math.floor(self.saturation * context / (self.saturation + context))
        return max(self.minimum, slots // self.round_to * self.round_to)

    def grown(self, slots: int, context: int, absorbed: int, chunk: int) -> int:
        """Count the slots after an update at context length `context` that had `slots` before it.

        `absorbed` tokens have then left the window; `chunk` is the number of tokens the update absorbs.
        """
        caps = [self.wanted(context), absorbed]
        if self.max_chunks is not None:
            caps.append(chunk * self.max_chunks)
        return min(max(min(caps), slots), slots + chunk)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class KVMSpec:
    """Settings of `kvm_attention`. LayerError names a setting out of range."""

    chunk: int
    """Tokens absorbed per update, and slots of the initial state."""
    window_chunks: int
    """Chunks a query sees exactly: its own, up to itself, and those before it."""
    rotary_dim: int
    """The first entries of each head are rotary; they are set to 0 in a key that enters the state."""
    sinks: int = 1
    """The first slots, which refuse merges."""
    budget: Budget = field(default_factory=Budget)
    gate_keys: bool = True
    gate_values: bool = True
    gate_appends: bool = False
    """The two gates above also hold for tokens that found a slot (after the initial state)."""
    gate_initial: bool = False
    """The initial state's keys and values are both gated; radii stay those of the ungated values."""
    values: str = "radius"
    """How a slot's value sum is read. radius: its direction, with the founding token's length; counts:
    divided by the number of tokens; reference_counts: the same by the public code's rule, which counts every
    update for every slot."""

    def __post_init__(self) -> None:
        for name in ("chunk", "window_chunks"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "a whole number of 1 or more")
        require(is_count(self.rotary_dim), "rotary_dim", self.rotary_dim, "above 0 and below the head size")
        sinks_fit = is_count(self.sinks, 0) and self.sinks <= self.chunk
        require(sinks_fit, "sinks", self.sinks, f"a whole number from 0 to chunk ({self.chunk})")
        require(self.values in VALUE_RULES, "values", self.values, ", ".join(VALUE_RULES))
        if self.sinks == self.chunk and self.slots_after(1) == self.chunk:
            raise LayerError(
                f"sinks is {self.sinks}, all slots of the first state (chunk {self.chunk}), and "
                "the budget adds none at the first update, so none can be merged: lower sinks or raise it"
            )
        grows = self.budget.mode != "fixed" or self.slots_after(1) > self.chunk
        if self.values == "reference_counts" and grows:
            raise LayerError(
                "values 'reference_counts' is defined only for a fixed budget of one chunk of slots"
            )

    @property
    def gated(self) -> bool:
        """Whether the merge gate has any influence."""
        return self.gate_keys or self.gate_values or self.gate_initial

    def growth(self, slots: int, number: int) -> int:
        """Count the slots after update `number` (1 or more; it absorbs that chunk), with `slots` before."""
        context = (self.window_chunks + number) * self.chunk
        return self.budget.grown(slots, context, (number + 1) * self.chunk, self.chunk)

    def sizes(self) -> Iterator[int]:
        """Yield the slots after update 0 (the initial state, a whole chunk), 1, 2, ..."""
        slots, number = self.chunk, 0
        while True:
            yield slots
            number += 1
            slots = self.growth(slots, number)

    def slots_after(self, number: int) -> int:
        """Count the slots after update `number`."""
        return next(islice(self.sizes(), number, None))

    def slots_at(self, position: int) -> int:
        """Count the slots of the state after `position` tokens."""
        start = self.window_start(position)
        return self.slots_after(start // self.chunk - 1) if start else min(position, self.chunk)

    def window_start(self, position: int) -> int:
        """Find the first token kept exactly after `position` tokens: where the last one's window starts."""
        return max(0, (-(-position // self.chunk) - self.window_chunks) * self.chunk)

    def coverage(self, position: int) -> int:
        """Count the tokens, from 0, that the slots hold after `position` tokens."""
        return max(min(position, self.chunk), self.window_start(position))


class Update(NamedTuple):
    """One step of the state: chunk `number` of the first `sequences` sequences enters it.

    Update 0 makes the initial state. The queries of chunk `number + window_chunks` read the result.
    """

    number: int
    sequences: int
    before: int  # slots
    after: int


def updates(spec: KVMSpec, last: list[int], first: int = 0, slots: int = 0) -> list[Update]:
    """List the updates from number `first` on, before which there are `slots` slots.

    `last`: each sequence's last update number, falling; all make update 0, the initial state.
    """
    steps = []
    for number in range(first, max(last[0], 0) + 1):
        after = spec.growth(slots, number) if number else spec.chunk
        steps.append(Update(number, sum(max(end, 0) >= number for end in last), slots, after))
        slots = after
    return steps
