"""Which chunks of a call are worked on together: the plan that `walk` follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from ..indices import kept
from ..softmax import ALL, Mask, Part
from ..softmax.grid import Span, rows
from ..softmax.joined import Rows
from .spec import KVMSpec, Update
from .steps import GROUP_BYTES, Steps, steps, update_bytes

GROUP_CHUNKS = 4
"""Updates in a group, at least: few, as caches are small. But a group has as many tokens of each sequence as
there are slots, as the slots before each group are kept for the backward."""


class Chunk(NamedTuple):
    """One turn of the walk: what enters the slots, and who reads them then."""

    update: Update | None
    """None: nothing enters."""
    readers: slice | None
    """Rows of the group's queries; None: nobody reads."""


@dataclass(frozen=True)
class Group:
    """Successive chunks whose queries attend to their windows all at once.

    Inside a group, rows are ordered by chunk, then by sequence. So the rows that belong together follow each
    other, and few of them need copying.
    """

    chunks: list[Chunk]
    entering: Rows
    """Rows of keys that enter the state, in the order of updates."""
    entering_tokens: slice
    """Which of their tokens do."""
    queries: Rows
    """Rows of queries."""
    keys: Rows
    """Rows of keys: the queries' windows."""
    window: list[Part]
    """The group's queries over its keys."""
    steps: Steps | None = None
    """Take the steps for all chunks at once, by this layout; None: chunk by chunk."""

    @property
    def updates(self) -> list[Update]:
        return [chunk.update for chunk in self.chunks if chunk.update is not None]

    @property
    def slots(self) -> int:
        """After its last update; 0 where it has none."""
        return self.updates[-1].after if self.updates else 0

    @property
    def readers(self) -> slice:
        """Rows of the group's queries that read slots."""
        found = [chunk.readers for chunk in self.chunks if chunk.readers is not None]
        return slice(found[0].start, found[-1].stop) if found else slice(0, 0)

    def without_queries(self) -> Group:
        """Keep only what enters the state."""
        chunks = [chunk._replace(readers=None) for chunk in self.chunks]
        steps = None if self.steps is None else self.steps._replace(keys=None)
        return replace(self, chunks=chunks, queries=slice(0, 0), keys=slice(0, 0), window=[], steps=steps)


def within_chunk(spec: KVMSpec, batch: int, position: int, tokens: int, slots: int) -> Group:
    """Plan a call at `position` whose tokens all lie in one chunk, such as a token to decode.

    Its rows are whole sequences: of queries the new tokens, of keys those held in the window and the new
    ones. So nothing is padded.
    """
    held = position - spec.window_start(position)
    gone = spec.window_start(position + tokens) - spec.window_start(position)
    number = position // spec.chunk - spec.window_chunks  # of the update whose slots the queries read
    every = slice(0, batch)
    update, entering, of_row = None, slice(0, 0), slice(0, spec.chunk)
    if position < spec.chunk:
        update, entering = Update(0, batch, position, position + tokens), every
        of_row = slice(held, held + tokens)
    elif gone and number > 0:
        update, entering = Update(number, batch, slots, spec.growth(slots, number)), every
    window = [Part(k_tokens=slice(gone, held))] if held > gone else []
    window.append(Part(k_tokens=slice(held, None), mask=Mask.LOWER))
    if tokens == 1:
        window = [Part(k_tokens=slice(gone, None))]
    chunk = Chunk(update, every if number >= 0 else None)
    return Group([chunk], entering, of_row, every, every, window)


@kept
def groups(
    spec: KVMSpec,
    spans: tuple[Span, ...],
    updates: tuple[Update, ...],
    device: torch.device,
    at_once: tuple[int, int] | None,
) -> list[Group]:
    """Plan a call on a grid: every chunk of queries and every update is in one group.

    `at_once`: key/value heads and their size, where groups are to be worked on as a whole.
    """
    window = spec.window_chunks
    found, start = [], spans[0].first
    for bundle in _bundles(updates, spec.chunk, at_once):
        end = min(bundle[-1].number + window + 1, spans[0].end)
        oldest = max(start + 1 - window, spans[0].first - spans[0].held)
        queries, keys = _Rows(spans, start, end), _Rows(spans, oldest, end)
        chunks = [Chunk(update, queries.of(update.number + window)) for update in bundle]
        if bundle[0].number + window > start >= window:  # the slots before the first update are read, too
            chunks.insert(0, Chunk(None, queries.of(start)))
        entering = [spans[b].key(update.number) for update in bundle for b in range(update.sequences)]
        found.append(
            Group(
                chunks,
                rows(entering, device),
                ALL,
                rows([spans[b].query(c) for c, b in queries.places], device),
                rows([spans[b].key(c) for c, b in keys.places], device),
                _window_parts(queries, keys, window, device),
                None if at_once is None else _steps(chunks, bundle, at_once[0], spec.chunk, device),
            )
        )
        start = end
    return found


class _Rows:
    """Chunks `start` to `end` of all sequences, by chunk, then by sequence: the first ones last longest."""

    def __init__(self, spans: Sequence[Span], start: int, end: int) -> None:
        counts = [sum(c < span.end for span in spans) for c in range(start, end)]
        self.start, self.end = start, end
        self.before = list(accumulate(counts, initial=0))
        self.places = [(c, b) for c, count in enumerate(counts, start) for b in range(count)]

    def row(self, chunk: int, sequence: int) -> int:
        return self.before[chunk - self.start] + sequence

    def of(self, chunk: int) -> slice | None:
        """Find the rows of one chunk; None where no sequence has it here."""
        if not self.start <= chunk < self.end:
            return None
        return slice(self.before[chunk - self.start], self.before[chunk - self.start + 1])


def _bundles(updates: Sequence[Update], chunk: int, at_once: tuple[int, int] | None) -> list[list[Update]]:
    """Cut the updates into those of one group each."""
    bundles: list[list[Update]] = []
    for update in updates:
        if not bundles or _full(bundles[-1], update, chunk, at_once):
            bundles.append([])
        bundles[-1].append(update)
    return bundles


def _full(bundle: list[Update], following: Update, chunk: int, at_once: tuple[int, int] | None) -> bool:
    if at_once is None:
        return len(bundle) >= max(GROUP_CHUNKS, following.after // chunk)
    return (len(bundle) + 2) * update_bytes(following, *at_once, chunk) > GROUP_BYTES


def _steps(chunks: list[Chunk], bundle: list[Update], heads: int, chunk: int, device: torch.device) -> Steps:
    """Lay out what is made at once: the state before the first update is read where a chunk makes none."""
    readers = [0 if c.readers is None else c.readers.stop - c.readers.start for c in chunks]
    if chunks[0].update is not None:
        readers.insert(0, 0)
    return steps(tuple(bundle), tuple(readers), heads, chunk, device)


def _window_parts(queries: _Rows, keys: _Rows, window: int, device: torch.device) -> list[Part]:
    """Let every chunk see itself, causally, and the `window - 1` chunks before it."""
    parts = []
    for back in range(window):
        seen = [
            (i, keys.row(c - back, b)) for i, (c, b) in enumerate(queries.places) if c - back >= keys.start
        ]
        if not seen:
            break
        q_rows, k_rows = (rows(numbers, device) for numbers in zip(*seen, strict=True))
        parts.append(Part(q_rows, k_rows=k_rows, mask=Mask.FULL if back else Mask.LOWER))
    return parts
