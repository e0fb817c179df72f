"""A batch read in successive pieces, each going on from the state that the one before left, without gradient.

Truncated backpropagation through time: the losses are those of the whole sequence, the gradients stop where a
piece begins, and memory is that of one piece (`train.tbptt_chunks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybrid.distributed.context_parallel import Piece
from hybrid.model.head import IGNORE, Loss


class Carried:
    """Reads pieces in order; holds the state between two of them."""

    def __init__(self) -> None:
        self._state: Any = None

    def read(self, model: Callable[..., Loss], piece: Piece, device: torch.device, **more: Any) -> Loss:
        """The model's loss on a piece; `more` goes to the model."""
        piece = piece.to(device)
        state = self._state if piece.goes_on else None
        if state is not None and piece.cu_seqlens is not None:
            state = [state, *[None] * (len(piece.cu_seqlens) - 2)]
        loss = model(piece.ids, state, **piece.arguments(), **more)
        last = loss.state[-1] if isinstance(loss.state, list) else loss.state
        self._state = None if last is None else last.detach()
        return loss


def cut(whole: Piece, count: int) -> Iterator[Piece]:
    """All of a batch in `count` pieces of equal length, the last ones shorter.

    Where there are fewer tokens, the last pieces are one token that is not counted: all ranks must make
    equally many passes.
    """
    if count == 1:
        yield whole
        return
    assert whole.shard is None, "a sequence is read in pieces or sharded over ranks"
    tokens = whole.ids.shape[1]
    size = -(-tokens // count)
    for first in range(0, size * count, size):
        yield stretch(whole, first, first + size) if first < tokens else _nothing(whole)


def stretch(whole: Piece, first: int, end: int) -> Piece:
    """Tokens `first` to `end` of the rows, or to where they end."""
    tokens, borders = whole.ids.shape[1], whole.cu_seqlens
    end = min(end, tokens)
    ids, labels = whole.ids[:, first:end], whole.labels[:, first:end]
    if borders is None:
        return Piece(ids, labels, None, None, first > 0, end < tokens)
    inside = borders[(borders > first) & (borders < end)] - first
    own = borders.new_tensor([0, *inside.tolist(), end - first])
    goes_on, unfinished = (not bool((borders == place).any()) for place in (first, end))
    return Piece(ids, labels, own, None, goes_on, unfinished)


def _nothing(whole: Piece) -> Piece:
    ids = whole.ids[:, :1]
    borders = None if whole.cu_seqlens is None else whole.cu_seqlens.new_tensor([0, 1])
    return Piece(ids, whole.labels.new_full(ids.shape, IGNORE), borders)
