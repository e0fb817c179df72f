"""Sampling: the choice of a continuation's next token from logits, and of where its text ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.errors import UserError


class GenerateError(UserError):
    """A prompt or a sampling value that cannot be used; the message names it and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """Settings of sampling and length; checked when built (GenerateError)."""

    max_tokens: int = 64
    """Most new tokens of a continuation; an end-of-text token or a stop string ends it earlier. 0: only read
    the prompt."""
    temperature: float = 0.0
    """0: always the most probable token (greedy). Above: logits are divided by it."""
    top_k: int = 0
    """Only the k most probable tokens; 0: all."""
    top_p: float = 1.0
    """Only the fewest tokens whose probabilities reach this sum; 1: all."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen in prompt or continuation are divided by it (multiplied where negative)."""
    seed: int = 0
    """Sample i of seed s draws the numbers that sample 0 of seed s + i draws."""
    stop: Sequence[str] = ()
    """Texts at whose first appearance a continuation ends, without them."""
    samples: int = 1
    """Continuations of each prompt."""
    batch: int = 16
    """Most sequences decoded side by side."""

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 0, "0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more, and finite"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "repetition_penalty": (1e-100 <= self.repetition_penalty <= 1e100, "1e-100 to 1e100; 1 is off"),
            "seed": (0 <= self.seed < 2**62, "0 to 2^62 - 1"),
            "stop": (all(self.stop), "texts of 1 character or more"),
            "samples": (1 <= self.samples <= 10**6, "1 to a million"),
            "batch": (self.batch >= 1, "1 or more"),
        }
        for name, (good, allowed) in rules.items():
            if not good:
                raise GenerateError(f"{name} is {getattr(self, name)}; it must be {allowed}")
        if self.samples > 1 and self.temperature == 0:
            raise GenerateError(
                f"samples is {self.samples}; at temperature 0 all would be equal, so it must be 1"
            )


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits `[V]` of the ids `seen` `[n]` (CTRL paper, section 4.1; negative logits are
    multiplied, as is usual, so that the penalty always lowers them)."""
    if penalty == 1.0:
        return logits
    logits = logits.double()  # which holds every float32 times or by every penalty
    at = logits[seen]
    return logits.index_put((seen,), torch.where(at > 0, at / penalty, at * penalty))


def kept_probabilities(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Find the tokens that may be drawn from logits `[V]` and their probabilities.

    Temperature first, then top-k, then top-p on what is left. The largest logit is taken off before the
    division, so that no temperature makes a number that is not finite of it. Returns probabilities (float64,
    falling, sum 1) and token ids, both `[K]`; equal logits are ranked by id.
    """
    ranked, ids = torch.sort(logits.double(), descending=True, stable=True)
    count = min(settings.top_k or len(ids), len(ids))
    ranked, ids = ranked[:count], ids[:count]
    probabilities = torch.softmax((ranked - ranked[0]) / settings.temperature, -1)
    if settings.top_p < 1:
        before = torch.cumsum(probabilities, -1) - probabilities
        count = max(1, int((before < settings.top_p).sum()))
        probabilities, ids = probabilities[:count], ids[:count]
        probabilities = probabilities / probabilities.sum()
    return probabilities, ids


def choose(logits: Tensor, settings: Settings, generator: torch.Generator, seen: Tensor) -> int:
    """Choose the next token id by logits `[V]`; `seen` are the ids of prompt and continuation so far.

    One uniform number per token is drawn on the CPU, so that a seed means the same on every device and
    whatever else is in the batch.
    """
    logits = penalise_repetition(logits, seen, settings.repetition_penalty)
    if settings.temperature == 0:
        return int(logits.argmax())
    probabilities, ids = kept_probabilities(logits, settings)
    draw = torch.rand((), generator=generator, dtype=torch.float64).item()
    rank = int((torch.cumsum(probabilities, -1) <= draw).sum())
    return int(ids[min(rank, len(ids) - 1)])


class StopMatcher:
    """Filter that passes text on up to the first stop string, wherever the text is split.

    Text that may turn out to begin a stop string is held back until that is known. Of several stop
    strings the one completed first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return what is now known to come before any stop string."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        hold = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """Return what was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Measure the longest proper beginning of `stop` that `text` ends with."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
