"""Continue prompts with a trained model: greedy or sampled, one state carried from token to token.

Prompts of unequal length are never padded. They are read as packed rows of bounded length, then go on
together, one packed row of one token each with a state each; a sequence that ends leaves and the next one
waiting takes its place. Every result is the one its prompt gets alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid.checkpoint.run import load_run
from hybrid.data.tokenizer import Tokenizer
from hybrid.model import HybridLM, HybridState

from .sampling import GenerateError, Settings, StopMatcher, choose
from .saved_state import SavedState, fingerprint

PREFILL_TOKENS = 1024
"""Prompt tokens read per call, over all prompts: bounds the memory that reading takes beside the states."""
DRAWN_AT_ONCE = 2**20
"""Random numbers passed over in one piece, to go on after a saved text."""

States = Sequence[HybridState | None]


def load_model(path: str | os.PathLike[str]) -> tuple[HybridLM, Tokenizer]:
    """Load the model of a run directory (its newest weights), on the GPU if there is one, and its tokenizer.

    A folder with the files of one checkpoint and tokenizer.model will do.
    """
    model, tokenizer, _ = load_run(path)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def prefill(
    model: HybridLM, prompts: Sequence[Tensor], states: States | None = None
) -> tuple[Tensor, list[HybridState]]:
    """Read prompts, int64 `[T]` each, in packed rows of at most PREFILL_TOKENS tokens.

    Args:
        states: what each prompt goes on from; None: they start.

    Returns:
        The logits after every prompt `[N, V]`, fp32, and the states.
    """
    after: list[Any] = [None] * len(prompts) if states is None else list(states)
    logits: list[Any] = [None] * len(prompts)
    for row in _packed_rows([len(prompt) for prompt in prompts]):
        segments = [prompts[index][start:end] for index, start, end in row]
        found, reached = read_row(model, segments, [after[index] for index, _, _ in row])
        for (index, _, _), last, state in zip(row, found, reached, strict=True):
            logits[index], after[index] = last, state
    return torch.stack(logits), after


def _packed_rows(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Pack prompts into rows of segments `(prompt, start, end)`, splitting a prompt where a row is full."""
    row: list[tuple[int, int, int]] = []
    room = PREFILL_TOKENS
    for index, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            row.append((index, start, end))
            room -= end - start
            start = end
            if not room:
                yield row
                row, room = [], PREFILL_TOKENS
    if row:
        yield row


def read_row(model: HybridLM, segments: Sequence[Tensor], states: States) -> tuple[Tensor, list[HybridState]]:
    """Read one packed row of segments `[T]`: the logits after each of them `[N, V]`, and the states."""
    ids = torch.cat(list(segments))[None]
    lengths = torch.tensor([0, *map(len, segments)], device=ids.device)
    borders = lengths.cumsum(0, dtype=torch.int32)
    logits, after = model(ids, list(states), cu_seqlens=borders, last_only=True)
    return logits[0], after


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


OnText = Callable[[int, int, str], None]
OnEnd = Callable[[Continuation], None]
OnState = Callable[[SavedState], None]


@torch.no_grad()
def generate(
    model: HybridLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    resume: SavedState | None = None,
    on_text: OnText | None = None,
    on_end: OnEnd | None = None,
    on_state: OnState | None = None,
    **settings: Any,
) -> list[Continuation]:
    """Continue every prompt.

    Args:
        model, tokenizer: of one run.
        prompts: texts; an empty one starts a new document.
        resume: where one prompt's text goes on, in place of a new document (an empty prompt adds nothing).
            The state in it is spent. With the settings of the call that made it the result is the one that
            call would have had with more `max_tokens`; only stop strings and characters across the border
            are seen in two halves.
        on_text: called as `on_text(prompt, sample, text)` with each new whole stretch of text.
        on_end: called with each continuation when it is complete.
        on_state: called after that with its state: after its last token, those of a stop string included,
            an end-of-text token not.
        settings: fields of `Settings` by name.

    Returns:
        `samples` continuations per prompt, in the order of the prompts.

    Raises:
        GenerateError: a value out of range, a prompt that is not text, or a model that has diverged.
        StateError: `resume` is another model's.
    """
    wanted = Settings(**settings)
    device = next(model.parameters()).device
    first = [tokenizer.bos_id]
    if resume is not None:
        if len(prompts) != 1:
            raise GenerateError(f"a saved text goes on with one prompt, not with {len(prompts)}")
        resume.refuse_other(model, tokenizer)
        first = []
    encoded = [first + _encode(tokenizer, prompt, index) for index, prompt in enumerate(prompts)]
    ids = [torch.tensor(prompt, dtype=torch.int64, device=device) for prompt in encoded]
    return _Job(model, tokenizer, wanted, ids, resume, on_text, on_end, on_state).run()


def _encode(tokenizer: Tokenizer, prompt: str, index: int) -> list[int]:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GenerateError(f"prompt {index + 1} is not valid Unicode text: {error.reason}") from None
    return tokenizer.encode(prompt)


@dataclass
class _Job:
    """One call of `generate`."""

    model: HybridLM
    tokenizer: Tokenizer
    settings: Settings
    prompts: list[Tensor]
    resume: SavedState | None
    on_text: OnText | None
    on_end: OnEnd | None
    on_state: OnState | None
    _known: dict[int, tuple[Tensor, HybridState]] = field(default_factory=dict)
    """Logits and state after each prompt that was read and has samples waiting."""

    def run(self) -> list[Continuation]:
        """Write every sample of every prompt, `batch` of them side by side."""
        samples = range(self.settings.samples)
        waiting = deque((prompt, sample) for prompt in range(len(self.prompts)) for sample in samples)
        rows: list[_Row] = []
        results = []
        while waiting or rows:
            room = min(len(waiting), self.settings.batch - len(rows))
            new = [_Row(*waiting.popleft(), self) for _ in range(room)]
            self._start(new)
            rows += new
            for row in rows:
                row.choose()
            for row in [row for row in rows if row.reason]:
                self._save(row)
                results.append(row.result())
            rows = [row for row in rows if not row.reason]
            self._step(rows)
        return sorted(results, key=lambda result: (result.prompt, result.sample))

    def _start(self, rows: list[_Row]) -> None:
        """Give every row logits and state after its prompt; each prompt is read once."""
        new = sorted({row.prompt for row in rows} - self._known.keys())
        resume = self.resume
        if new and resume is not None and not len(self.prompts[0]):
            self._known[0] = resume.logits, resume.state
        elif new:
            states = None if resume is None else [resume.state]
            logits, after = prefill(self.model, [self.prompts[index] for index in new], states)
            self._known.update(zip(new, zip(logits, after, strict=True), strict=True))
        for row in rows:
            last = row.sample == self.settings.samples - 1
            logits, state = self._known.pop(row.prompt) if last else self._known[row.prompt]
            row.take(logits, state if last else state.fork())

    def _step(self, rows: list[_Row]) -> None:
        """Read every row's last token."""
        if rows:
            tokens = torch.tensor([row.ids[-1] for row in rows], device=self.prompts[0].device)
            found = read_row(self.model, tokens.split(1), [row.state for row in rows])
            for row, logits, state in zip(rows, *found, strict=True):
                row.take(logits, state)

    def _save(self, row: _Row) -> None:
        """Hand on the state of a row that ended, all its tokens read."""
        if self.on_state is None:
            return
        if row.ids and row.reason != "eos":
            self._step([row])
        made_by = fingerprint(self.model), self.tokenizer.fingerprint
        self.on_state(SavedState(row.state, row.logits, row.seen, row.draws, *made_by))


class _Row:
    """One continuation while it is being written."""

    logits: Tensor
    """Of the next token `[V]`, without the padding of the vocabulary."""
    state: HybridState
    """After all tokens that were read."""

    def __init__(self, prompt: int, sample: int, job: _Job) -> None:
        self.prompt, self.sample, self.job = prompt, sample, job
        self.ids: list[int] = []
        self.parts: list[str] = []
        self.reason = ""
        ids = job.prompts[prompt]
        self._seen = torch.zeros(job.tokenizer.vocab_size, dtype=torch.bool, device=ids.device)
        self._seen[ids] = True
        self._generator = torch.Generator().manual_seed(job.settings.seed + sample)
        self.draws = 0
        if job.resume is not None:
            self._seen[job.resume.seen] = True
            self.draws = job.resume.draws
            for start in range(0, self.draws, DRAWN_AT_ONCE):
                count = min(DRAWN_AT_ONCE, self.draws - start)
                torch.rand(count, generator=self._generator, dtype=torch.float64)
        self._decoder = job.tokenizer.stream()
        self._stops = StopMatcher(job.settings.stop)

    @property
    def seen(self) -> Tensor:
        """The different ids so far."""
        return self._seen.nonzero()[:, 0]

    def take(self, logits: Tensor, state: HybridState) -> None:
        """Go on with what the model gave; GenerateError when it is not finite."""
        self.logits, self.state = logits[: self.job.tokenizer.vocab_size].float(), state
        if not torch.isfinite(self.logits).all():
            raise GenerateError(
                f"the model gave logits that are not finite after {len(self.ids)} new tokens of prompt "
                f"{self.prompt + 1}; its weights are probably from a run that diverged"
            )

    def choose(self) -> None:
        """Choose the next token and pass its text on; sets `reason` when this row ends."""
        settings = self.job.settings
        if not settings.max_tokens:
            self._finish("length")
            return
        token = choose(self.logits, settings, self._generator, self.seen)
        if token == self.job.tokenizer.eos_id:
            self._finish("eos")
            return
        self.ids.append(token)
        self.draws += settings.temperature > 0
        self._seen[token] = True
        self._emit(self._stops.push(self._decoder.push(token)))
        if self._stops.stopped:
            self._finish("stop")
        elif len(self.ids) == settings.max_tokens:
            self._finish("length")

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
