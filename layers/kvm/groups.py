"""Which chunks are worked on together: the plan that `chunks` follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..softmax import Mask, Part
from ..softmax.grid import ChunkGrid, rows
from ..softmax.joined import Rows
from .spec import KVMSpec, Update

GROUP_CHUNKS = 4
"""Updates in a group, at least: few, as caches are small. But a group has as many tokens of each sequence as
there are slots, as the slots before each group are kept for the backward."""


@dataclass(frozen=True)
class Group:
    """Successive updates, and the chunks whose queries meet their slots.

    Inside a group, rows are ordered by chunk, then by sequence. So the rows that belong together follow each
    other, and few of them need copying.
    """

    steps: list[Update]
    rows: slice
    """Of all rows that enter the state."""
    entering: Rows
    """Of the grid's keys: those that enter the state."""
    queries: Rows
    """Of the grid."""
    keys: Rows
    """Of the grid: the queries' windows."""
    window: list[Part]
    """The group's queries over its keys."""
    readers: list[slice | None]
    """For each update, which of the group's queries read the slots it leaves."""


def groups(spec: KVMSpec, grid: ChunkGrid, steps: Sequence[Update], device: torch.device) -> list[Group]:
    """Every chunk of queries and every update is in one group."""
    spans, window = grid.spans, spec.window_chunks
    found, row, start = [], 0, spans[0].first
    for bundle in _bundles(steps, spec.chunk):
        end = min(bundle[-1].number + window + 1, spans[0].end)
        oldest = max(start + 1 - window, spans[0].first - spans[0].held)
        queries, keys = _Rows(grid, start, end), _Rows(grid, oldest, end)
        count = sum(step.sequences for step in bundle)
        entering = [spans[b].key(step.number) for step in bundle for b in range(step.sequences)]
        found.append(
            Group(
                bundle,
                slice(row, row + count),
                rows(entering, device),
                rows([spans[b].query(c) for c, b in queries.places], device),
                rows([spans[b].key(c) for c, b in keys.places], device),
                _window_parts(queries, keys, window, device),
                [_readers(queries, step, window) for step in bundle],
            )
        )
        row += count
        start = end
    return found


class _Rows:
    """Chunks `start` to `end` of all sequences, by chunk, then by sequence: the first ones last longest."""

    def __init__(self, grid: ChunkGrid, start: int, end: int) -> None:
        counts = [sum(c < span.end for span in grid.spans) for c in range(start, end)]
        self.start, self.end = start, end
        self.before = list(accumulate(counts, initial=0))
        self.places = [(c, b) for c, count in enumerate(counts, start) for b in range(count)]

    def row(self, chunk: int, sequence: int) -> int:
        return self.before[chunk - self.start] + sequence

    def count(self, chunk: int) -> int:
        """Sequences that have this chunk here."""
        if not self.start <= chunk < self.end:
            return 0
        return self.before[chunk - self.start + 1] - self.before[chunk - self.start]


def _bundles(steps: Sequence[Update], chunk: int) -> list[list[Update]]:
    bundles: list[list[Update]] = [[]]
    for step in steps:
        if len(bundles[-1]) >= max(GROUP_CHUNKS, step.after // chunk):
            bundles.append([])
        bundles[-1].append(step)
    return bundles


def _window_parts(queries: _Rows, keys: _Rows, window: int, device: torch.device) -> list[Part]:
    """Every chunk over itself, causally, and over the `window - 1` chunks before it."""
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


def _readers(queries: _Rows, step: Update, window: int) -> slice | None:
    """Queries of the chunk that reads the slots after `step`; None where there is no such chunk."""
    chunk = step.number + window
    count = min(step.sequences, queries.count(chunk))
    return slice(queries.row(chunk, 0), queries.row(chunk, count)) if count else None
