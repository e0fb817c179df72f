"""Continue prompts with a trained model: greedy or sampled, one state carried from token to token.

Prompts of unequal length are never padded: those of equal length share a batch, the others are
processed one group after another, so every result is the one its prompt gets alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .data import Tokenizer
    from .model import HybridLM

PREFILL_TOKENS = 1024
"""Prompt tokens read per call over all sequences of a batch: bounds the memory of long prompts."""


class GenerateError(ValueError):
    """A prompt or a sampling value that cannot be used; the message names it and what is allowed."""


@dataclass(frozen=True)
class Settings:
    """How continuations are written; checked when built (GenerateError)."""

    max_tokens: int = 64
    """Most new tokens of a continuation; an end-of-text token or a stop string ends it earlier."""
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
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more, and finite"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0 and finite; 1 is off"),
            "seed": (0 <= self.seed < 2**62, "0 to 2^62 - 1"),
            "stop": (all(self.stop), "texts of 1 character or more"),
            "samples": (self.samples >= 1, "1 or more"),
            "batch": (self.batch >= 1, "1 or more"),
        }
        for name, (good, allowed) in rules.items():
            if not good:
                raise GenerateError(f"{name} is {getattr(self, name)}; it must be {allowed}")
        if self.samples > 1 and self.temperature == 0:
            raise GenerateError(
                f"samples is {self.samples}; at temperature 0 all would be equal, so it must be 1"
            )


@dataclass(frozen=True)
class Continuation:
    """One sample of one prompt."""

    prompt: int
    sample: int
    ids: tuple[int, ...]
    """The tokens chosen, without the end-of-text token."""
    text: str
    """What follows the prompt; ends before the stop string when one was met."""
    reason: str
    """Why it ended: "eos", "stop" or "length"."""


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits `[V]` with those of the ids `seen` `[n]` made less likely (CTRL paper, section 4.1;
    negative logits are multiplied, as is usual, so that the penalty always lowers them)."""
    if penalty == 1.0 or seen.numel() == 0:
        return logits
    at = logits[seen]
    return logits.index_put((seen,), torch.where(at > 0, at / penalty, at * penalty))


def kept_probabilities(logits: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn from logits `[V]` and their probabilities.

    Temperature first, then top-k, then top-p on what is left. Returns probabilities (float64, falling, sum 1)
    and token ids, both `[K]`; equal logits are ranked by id.
    """
    ranked, ids = torch.sort(logits.double() / settings.temperature, descending=True, stable=True)
    if settings.top_k:
        ranked, ids = ranked[: settings.top_k], ids[: settings.top_k]
    probabilities = torch.softmax(ranked, -1)
    if settings.top_p < 1:
        before = torch.cumsum(probabilities, -1) - probabilities
        count = max(1, int((before < settings.top_p).sum()))
        probabilities, ids = probabilities[:count], ids[:count]
        probabilities = probabilities / probabilities.sum()
    return probabilities, ids


def choose(logits: Tensor, settings: Settings, generator: torch.Generator, seen: Tensor) -> int:
    """The next token id from logits `[V]`; `seen` are the ids of prompt and continuation so far.

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
    """Passes text on up to the first stop string, wherever the pieces are cut.

    Text that may turn out to begin a stop string is held back until that is known. Of several stop
    strings the one completed first counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now known to come before any stop string."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        hold = max((self._overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest proper beginning of `stop` that `text` ends with."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def prefill(model: HybridLM, ids: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Read prompts `[B, T]` in pieces of at most PREFILL_TOKENS tokens: last logits `[B, V]` fp32, state."""
    logits = None
    for piece in ids.split(max(1, PREFILL_TOKENS // ids.shape[0]), 1):
        logits, state = model(piece, state)
        logits = logits[:, -1]
    assert logits is not None, "a prompt has at least one token"
    return logits, state


OnText = Callable[[int, int, str], None]
OnEnd = Callable[[Continuation], None]


class _Row:
    """One continuation while it is being written."""

    def __init__(self, prompt: int, sample: int, ids: Sequence[int], job: _Job) -> None:
        self.prompt, self.sample, self.job = prompt, sample, job
        self.ids: list[int] = []
        self.parts: list[str] = []
        self.reason = ""
        self._seen = torch.zeros(job.tokenizer.vocab_size, dtype=torch.bool, device=job.device)
        self._seen[torch.as_tensor(ids, device=job.device)] = True
        self._generator = torch.Generator().manual_seed(job.settings.seed + sample)
        self._decoder = job.tokenizer.stream()
        self._stops = StopMatcher(job.settings.stop)

    def step(self, logits: Tensor) -> int:
        """Choose the next token from logits `[V]` and pass its text on; sets `reason` when this row ends."""
        token = choose(logits, self.job.settings, self._generator, self._seen.nonzero()[:, 0])
        if token == self.job.tokenizer.eos_id:
            self._finish("eos")
            return token
        self.ids.append(token)
        self._seen[token] = True
        self._emit(self._stops.push(self._decoder.push(token)))
        if self._stops.stopped:
            self._finish("stop")
        elif len(self.ids) == self.job.settings.max_tokens:
            self._finish("length")
        return token

    def _finish(self, reason: str) -> None:
        if reason != "stop":
            self._emit(self._stops.push(self._decoder.finish()))
            reason = "stop" if self._stops.stopped else reason
        if reason != "stop":
            self._emit(self._stops.finish())
        self.reason = reason
        if self.job.on_end:
            self.job.on_end(self.result())

    def _emit(self, text: str) -> None:
        if text:
            self.parts.append(text)
            if self.job.on_text:
                self.job.on_text(self.prompt, self.sample, text)

    def result(self) -> Continuation:
        return Continuation(self.prompt, self.sample, tuple(self.ids), "".join(self.parts), self.reason)


@dataclass(frozen=True)
class _Job:
    """What all rows of one call share."""

    model: HybridLM
    tokenizer: Tokenizer
    settings: Settings
    on_text: OnText | None
    on_end: OnEnd | None
    device: torch.device

    def decode(self, rows: list[_Row], logits: Tensor, state: Any) -> None:
        """Write all rows to their ends, from the prompts' last logits `[R, V]` and the state after them."""
        while True:
            logits = self._usable(logits, rows)
            tokens = [row.step(logits[index]) for index, row in enumerate(rows)]
            going = [index for index, row in enumerate(rows) if not row.reason]
            if not going:
                return
            if len(going) < len(rows):
                state = select_rows(state, going)
                rows = [rows[index] for index in going]
            ids = torch.tensor([[tokens[index]] for index in going], device=self.device)
            logits, state = self.model(ids, state)
            logits = logits[:, -1]

    def _usable(self, logits: Tensor, rows: list[_Row]) -> Tensor:
        """Without the padding of the vocabulary; GenerateError when not finite."""
        logits = logits[:, : self.tokenizer.vocab_size].float()
        finite = torch.isfinite(logits).all(-1)
        if not finite.all():
            row = rows[int((~finite).nonzero()[0])]
            raise GenerateError(
                f"the model gave logits that are not finite after {len(row.ids)} new tokens of prompt "
                f"{row.prompt + 1}; its weights are probably from a run that diverged"
            )
        return logits


@torch.no_grad()
def generate(
    model: HybridLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    on_text: OnText | None = None,
    on_end: OnEnd | None = None,
    **settings: Any,
) -> list[Continuation]:
    """Continue every prompt.

    Args:
        model, tokenizer: of one run.
        prompts: texts; an empty one starts a new document.
        on_text: called as `on_text(prompt, sample, text)` with each new whole piece of text.
        on_end: called with each continuation when it is complete.
        settings: fields of `Settings` by name.

    Returns:
        `samples` continuations per prompt, in the order of the prompts.

    Raises:
        GenerateError: a value out of range, a prompt that is not text, or a model that has diverged.
    """
    wanted = Settings(**settings)
    device = next(model.parameters()).device
    job = _Job(model, tokenizer, wanted, on_text, on_end, device)
    encoded = [_encode(tokenizer, prompt, index) for index, prompt in enumerate(prompts)]
    results: dict[tuple[int, int], Continuation] = {}
    for group in _groups(encoded, max(1, wanted.batch // wanted.samples)):
        logits, state = prefill(model, torch.tensor([encoded[index] for index in group], device=device))
        pairs = [(at, sample) for at in range(len(group)) for sample in range(wanted.samples)]
        for start in range(0, len(pairs), wanted.batch):
            part = pairs[start : start + wanted.batch]
            rows = [_Row(group[at], sample, encoded[group[at]], job) for at, sample in part]
            sources = [at for at, _ in part]
            job.decode(list(rows), logits[sources], select_rows(state, sources))
            results.update({(row.prompt, row.sample): row.result() for row in rows})
    return [results[key] for key in sorted(results)]


def _groups(encoded: list[list[int]], size: int) -> list[list[int]]:
    """Indices of prompts of equal length, at most `size` together, in the order of their first member."""
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(encoded):
        by_length.setdefault(len(ids), []).append(index)
    groups = [same[at : at + size] for same in by_length.values() for at in range(0, len(same), size)]
    return sorted(groups)


def _encode(tokenizer: Tokenizer, prompt: str, index: int) -> list[int]:
    """The ids of a document that begins with `prompt`."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GenerateError(f"prompt {index + 1} is not valid Unicode text: {error.reason}") from None
    return [tokenizer.bos_id, *tokenizer.encode(prompt)]


def select_rows(state: Any, rows: Sequence[int]) -> Any:
    """An independent state with the sequences `rows` of `state` in that order, repeats allowed."""
    return state.map(lambda tensor: tensor[list(rows)])


def load_model(path: str | os.PathLike[str]) -> tuple[HybridLM, Tokenizer]:
    """The model of a run directory (its newest weights), or of a folder with recipe.yaml, tokenizer.model and
    model.safetensors, on the GPU if there is one; and its tokenizer."""
    from .runs import load_run

    model, tokenizer, _ = load_run(path)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
