"""Rows of ids and labels put together to what the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORE = -100
"""Label of a position that is not counted."""


@dataclass(frozen=True)
class Segment:
    """Stored ids of one document in a row."""

    source: str
    document: int
    """Number within the source."""
    offset: int
    """Place of the first id in the document (0: its begin id)."""
    length: int
    epoch: int = 0
    fresh: bool = True
    """False only in ordered mode: the segment goes on where the lane's previous one stopped."""


@dataclass(frozen=True)
class Row:
    """One sequence: inputs and labels `[T]` (int64), and what they are made of."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    segments: tuple[Segment, ...]


@dataclass
class Batch:
    """What one forward pass of one rank reads, and where it comes from."""

    ids: Tensor
    """int64 `[b, T]`, or `[1, N]`: all rows packed in one."""
    labels: Tensor
    """int64 of the same shape, aligned with the model's predictions: the next id, or -100 (not counted)."""
    cu_seqlens: Tensor | None
    """int32 borders of packed segments; None: b equal rows."""
    first_sample: int
    """Global number of the first row."""
    segments: list[Segment] = field(default_factory=list)
    """Of all rows, one after the other."""


def collate(rows: Sequence[Row], packed: bool, first_sample: int) -> Batch:
    """Stack rows of one length to `[b, T]`; `packed`: join them to one, with borders at every segment."""
    segments = [segment for row in rows for segment in row.segments]
    join = np.concatenate if packed else np.stack
    ids = torch.from_numpy(join([row.ids for row in rows]))
    labels = torch.from_numpy(join([row.labels for row in rows]))
    if not packed:
        return Batch(ids, labels, None, first_sample, segments)
    borders = np.cumsum([0] + [segment.length for segment in segments]).astype(np.int32)
    return Batch(ids[None], labels[None], torch.from_numpy(borders), first_sample, segments)
