"""A grid: sequences laid out in rows of whole chunks; and the parts of a softmax over a window of such
chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..indices import index, on_device
from .joined import Part, Rows
from .kernels import Mask


@dataclass(frozen=True)
class Span:
    """One sequence's place in a grid."""

    first: int  # chunk index, in the sequence, of its first query row
    held: int  # rows of earlier keys in front of the first query row's keys
    count: int  # query rows
    query_row: int
    key_row: int

    @property
    def end(self) -> int:
        """Index of the chunk after the last one."""
        return self.first + self.count

    def query(self, chunk: int) -> int:
        """Find the grid row of that chunk's queries."""
        assert self.first <= chunk < self.end
        return self.query_row + chunk - self.first

    def key(self, chunk: int) -> int:
        """Find the grid row of that chunk's keys."""
        assert self.first - self.held <= chunk < self.end
        return self.key_row + chunk - self.first + self.held


@dataclass(frozen=True)
class ChunkGrid:
    """Rows of `chunk` tokens on which the attention of every chunk is one of many equal blocks.

    Chunks are aligned to positions in the sequence. Missing tokens in a row (before the first query, after
    the last token) are filled in; a causal mask hides the latter from real queries.
    """

    chunk: int
    spans: tuple[Span, ...]
    tokens: int  # per sequence (equal sequences), or of all of them (packed)
    front: int = 0  # filled-in queries before the first real one
    index: Tensor | None = None  # packed: token of every place in the grid
    places: Tensor | None = None  # packed: place in the grid of every token

    @classmethod
    def equal(cls, batch: int, tokens: int, chunk: int, position: int = 0, held: int = 0) -> ChunkGrid:
        """Lay out `batch` sequences of `tokens` tokens that start at `position`; keys start `held` chunks
        earlier."""
        first, front = divmod(position, chunk)
        count = -(-(front + tokens) // chunk)
        spans = (Span(first, held, count, b * count, b * (held + count)) for b in range(batch))
        return cls(chunk, tuple(spans), tokens, front)

    @classmethod
    def packed(
        cls, starts: Sequence[int], lengths: Sequence[int], chunk: int, device: torch.device
    ) -> ChunkGrid:
        """Lay out documents of one row, each from its own position 0: `lengths[i]` tokens from `starts[i]`
        on."""
        spans: list[Span] = []
        tokens, places = [], []
        for start, length in zip(starts, lengths, strict=True):
            row, count = spans[-1].query_row + spans[-1].count if spans else 0, -(-length // chunk)
            spans.append(Span(0, 0, count, row, row))
            tokens.append(torch.arange(start, start + count * chunk).clamp_(max=start + length - 1))
            places.append(torch.arange(row * chunk, row * chunk + length))
        every, found = (on_device(torch.cat(x), device) for x in (tokens, places))
        return cls(chunk, tuple(spans), sum(lengths), index=every, places=found)

    def queries(self, x: Tensor) -> Tensor:
        """Take `[B, T, ...]` to `[query rows, chunk, ...]`."""
        return self._rows(x, self.front)

    def keys(self, x: Tensor) -> Tensor:
        """Take `[B, held * chunk + front + T, ...]` to `[key rows, chunk, ...]`."""
        return self._rows(x, 0)

    def _rows(self, x: Tensor, front: int) -> Tensor:
        if self.index is not None:
            return x[0].index_select(0, self.index).unflatten(0, (-1, self.chunk))
        tail = -(front + x.shape[1]) % self.chunk
        if front or tail:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (front, tail))
        return x.reshape(-1, self.chunk, *x.shape[2:])

    def tokens_of(self, y: Tensor) -> Tensor:
        """Take `[query rows, chunk, ...]` back to `[B, T, ...]`."""
        if self.places is not None:
            return y.flatten(0, 1).index_select(0, self.places).unsqueeze(0)
        y = y.reshape(len(self.spans), -1, *y.shape[2:])
        return y[:, self.front : self.front + self.tokens]

    def window_parts(self, window_chunks: int, device: torch.device) -> list[Part]:
        """Show every chunk itself, causally, and the `window_chunks - 1` chunks before it."""
        chunks = [(span, chunk) for span in self.spans for chunk in range(span.first, span.end)]
        parts = []
        for back in range(window_chunks):
            seen = [(i, s.key(c - back)) for i, (s, c) in enumerate(chunks) if c - back >= s.first - s.held]
            if not seen:
                break
            q_rows, k_rows = (rows(numbers, device) for numbers in zip(*seen, strict=True))
            parts.append(Part(q_rows, k_rows=k_rows, mask=Mask.FULL if back else Mask.LOWER))
        return parts


def rows(numbers: Iterable[int], device: torch.device) -> Rows:
    """Select these rows: by a slice, which needs no copy, where they follow each other."""
    numbers = list(numbers)
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return index(tuple(numbers), device)
