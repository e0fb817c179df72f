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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sampling import GenerateError, Settings, StopMatcher, choose
from .saved_state import Bookmark, fingerprint

if TYPE_CHECKING:
    from hybrid.data.tokenizer import Tokenizer
    from hybrid.model import HybridLM
    from hybrid.model.state import HybridState

PREFILL_TOKENS = 1024
"""Prompt tokens read per call, over all prompts: bounds the memory that reading takes beside the states."""


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


States = Sequence["HybridState | None"]


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
    for row in _prompt_rows([len(prompt) for prompt in prompts]):
        pieces = [prompts[index][start:end] for index, start, end in row]
        found, reached = read_row(model, pieces, [after[index] for index, _, _ in row])
        for (index, _, _), last, state in zip(row, found, reached, strict=True):
            logits[index], after[index] = last, state
    return torch.stack(logits), after


def _prompt_rows(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Rows of pieces `(prompt, start, end)`: the prompts one after another, cut wherever a row is full."""
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


def read_row(model: HybridLM, pieces: Sequence[Tensor], states: States) -> tuple[Tensor, list[HybridState]]:
    """One packed row: the logits after every piece `[N, V]`, and the states."""
    ids = torch.cat(list(pieces))[None]
    lengths = torch.tensor([0, *map(len, pieces)], device=ids.device)
    borders = lengths.cumsum(0, dtype=torch.int32)
    logits, after = model(ids, list(states), cu_seqlens=borders, last_only=True)
    return logits[0], after


OnText = Callable[[int, int, str], None]
OnEnd = Callable[[Continuation], None]
OnBookmark = Callable[[Bookmark], None]


class _Row:
    """One continuation while it is being written."""

    logits: Tensor
    """Of the next token `[V]`."""
    state: HybridState
    """After all tokens that were read."""

    def __init__(self, prompt: int, sample: int, job: _Job) -> None:
        self.prompt, self.sample, self.job = prompt, sample, job
        self.ids: list[int] = []
        self.parts: list[str] = []
        self.reason = ""
        self._seen = torch.zeros(job.tokenizer.vocab_size, dtype=torch.bool, device=job.device)
        self._seen[job.prompts[prompt]] = True
        self._generator = torch.Generator().manual_seed(job.settings.seed + sample)
        if job.begin is not None:
            self._seen[job.begin.seen] = True
            torch.rand(job.begin.draws, generator=self._generator, dtype=torch.float64)
        self._decoder = job.tokenizer.stream()
        self._stops = StopMatcher(job.settings.stop)

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
        self._seen[token] = True
        self._emit(self._stops.push(self._decoder.push(token)))
        if self._stops.stopped:
            self._finish("stop")
        elif len(self.ids) == settings.max_tokens:
            self._finish("length")

    @property
    def seen(self) -> Tensor:
        """The different ids so far."""
        return self._seen.nonzero()[:, 0]

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

    def bookmark(self, model: str) -> Bookmark:
        """Where the row stands, all its tokens read."""
        begin, settings = self.job.begin, self.job.settings
        draws = (0 if begin is None else begin.draws) + (len(self.ids) if settings.temperature else 0)
        return Bookmark(self.state, self.logits, self.seen, draws, model, self.job.tokenizer.fingerprint)


@dataclass
class _Job:
    """One call of `generate`."""

    model: HybridLM
    tokenizer: Tokenizer
    settings: Settings
    prompts: list[Tensor]
    begin: Bookmark | None
    on_text: OnText | None
    on_end: OnEnd | None
    on_bookmark: OnBookmark | None
    device: torch.device
    _known: dict[int, tuple[Tensor, HybridState]] = field(default_factory=dict)
    """Logits and state after each prompt that was read and has samples waiting."""

    def run(self) -> list[Continuation]:
        """Every sample of every prompt, `batch` of them side by side."""
        samples = range(self.settings.samples)
        waiting = deque((prompt, sample) for prompt in range(len(self.prompts)) for sample in samples)
        rows: list[_Row] = []
        results = []
        while waiting or rows:
            room = min(len(waiting), self.settings.batch - len(rows))
            new = [_Row(*waiting.popleft(), self) for _ in range(room)]
            self._begin(new)
            rows += new
            for row in rows:
                row.choose()
            ended = [row for row in rows if row.reason]
            for row in ended:
                self._keep(row)
                results.append(row.result())
            rows = [row for row in rows if not row.reason]
            self._step(rows)
        return sorted(results, key=lambda result: (result.prompt, result.sample))

    def _begin(self, rows: list[_Row]) -> None:
        """Give every row logits and state after its prompt; each prompt is read once."""
        new = sorted({row.prompt for row in rows} - self._known.keys())
        begin = self.begin
        if new and begin is not None and not len(self.prompts[0]):
            self._known[0] = begin.logits, begin.state
        elif new:
            states = None if begin is None else [begin.state]
            logits, after = prefill(self.model, [self.prompts[index] for index in new], states)
            self._known.update(zip(new, zip(logits, after, strict=True), strict=True))
        for row in rows:
            last = row.sample == self.settings.samples - 1
            logits, state = self._known.pop(row.prompt) if last else self._known[row.prompt]
            self._give(row, logits, state if last else state.fork())

    def _step(self, rows: list[_Row]) -> None:
        """Read every row's last token."""
        if rows:
            tokens = torch.tensor([row.ids[-1] for row in rows], device=self.device)
            found = read_row(self.model, tokens.split(1), [row.state for row in rows])
            for row, logits, state in zip(rows, *found, strict=True):
                self._give(row, logits, state)

    def _give(self, row: _Row, logits: Tensor, state: HybridState) -> None:
        """Without the padding of the vocabulary; GenerateError when not finite."""
        row.logits, row.state = logits[: self.tokenizer.vocab_size].float(), state
        if not torch.isfinite(row.logits).all():
            raise GenerateError(
                f"the model gave logits that are not finite after {len(row.ids)} new tokens of prompt "
                f"{row.prompt + 1}; its weights are probably from a run that diverged"
            )

    def _keep(self, row: _Row) -> None:
        """Hand on where a row that ended stands."""
        if self.on_bookmark is not None:
            if row.ids and row.reason != "eos":
                self._step([row])
            self.on_bookmark(row.bookmark(fingerprint(self.model)))


@torch.no_grad()
def generate(
    model: HybridLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    begin: Bookmark | None = None,
    on_text: OnText | None = None,
    on_end: OnEnd | None = None,
    on_bookmark: OnBookmark | None = None,
    **settings: Any,
) -> list[Continuation]:
    """Continue every prompt.

    Args:
        model, tokenizer: of one run.
        prompts: texts; an empty one starts a new document.
        begin: where one prompt's text goes on, in place of a new document (an empty prompt adds nothing).
            The state in it is spent. With the settings of the call that made it the result is the one that
            call would have had with more `max_tokens`; only stop strings and characters across the border
            are seen in two halves.
        on_text: called as `on_text(prompt, sample, text)` with each new whole piece of text.
        on_end: called with each continuation when it is complete.
        on_bookmark: called after that with where it stands: after its last token, those of a stop string
            included, an end-of-text token not.
        settings: fields of `Settings` by name.

    Returns:
        `samples` continuations per prompt, in the order of the prompts.

    Raises:
        GenerateError: a value out of range, a prompt that is not text, or a model that has diverged.
        StateError: `begin` is another model's.
    """
    wanted = Settings(**settings)
    device = next(model.parameters()).device
    first = [tokenizer.bos_id]
    if begin is not None:
        if len(prompts) != 1:
            raise GenerateError(f"a saved text goes on with one prompt, not with {len(prompts)}")
        begin.refuse_other(model, tokenizer)
        first = []
    encoded = [first + _encode(tokenizer, prompt, index) for index, prompt in enumerate(prompts)]
    tensors = [torch.tensor(ids, dtype=torch.int64, device=device) for ids in encoded]
    return _Job(model, tokenizer, wanted, tensors, begin, on_text, on_end, on_bookmark, device).run()


def _encode(tokenizer: Tokenizer, prompt: str, index: int) -> list[int]:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GenerateError(f"prompt {index + 1} is not valid Unicode text: {error.reason}") from None
    return tokenizer.encode(prompt)


def load_model(path: str | os.PathLike[str]) -> tuple[HybridLM, Tokenizer]:
    """The model of a run directory (its newest weights), or of a folder with recipe.yaml, tokenizer.model and
    model.safetensors, on the GPU if there is one; and its tokenizer."""
    from hybrid.checkpoint.run import load_run

    model, tokenizer, _ = load_run(path)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer
