"""Truncated backpropagation through time (`train.tbptt_chunks`): a batch read in successive chunks.

Each goes on from the state that the one before left, without gradient: the losses are those of the whole
sequence, the gradients stop where a chunk begins, and memory is that of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybrid.distributed.context_parallel import Inputs
from hybrid.model.head import IGNORE, Loss


class ChunkReader:
    """Runs a model on tbptt chunks in order; holds the state between two of them."""

    def __init__(self, model: Callable[..., Loss], device: torch.device) -> None:
        self._model, self._device = model, device
        self._state: Any = None

    def read(self, chunk: Inputs, **options: Any) -> Loss:
        """Compute the model's loss on a chunk; `options` go to the model."""
        chunk = chunk.to(self._device)
        state = self._state if chunk.continues else None
        if state is not None and chunk.cu_seqlens is not None:
            state = [state, *[None] * (len(chunk.cu_seqlens) - 2)]
        loss = self._model(chunk.ids, state, **chunk.options(), **options)
        last = loss.state[-1] if isinstance(loss.state, list) else loss.state
        self._state = None if last is None else last.detach()
        return loss


def chunks(whole: Inputs, count: int) -> Iterator[Inputs]:
    """Split a batch in `count` chunks of equal length, the last ones shorter.

    Where there are fewer tokens, the last chunks are one token that is not counted: all ranks must make
    equally many passes.
    """
    if count == 1:
        yield whole
        return
    assert whole.shard is None, "a sequence is read in chunks or shared by ranks"
    tokens = whole.ids.shape[1]
    size = -(-tokens // count)
    for first in range(0, size * count, size):
        yield token_range(whole, first, first + size) if first < tokens else _uncounted(whole)


def token_range(whole: Inputs, first: int, end: int) -> Inputs:
    """Take tokens `first` to `end` of the rows, or to where they end."""
    tokens, borders = whole.ids.shape[1], whole.cu_seqlens
    end = min(end, tokens)
    ids, labels = whole.ids[:, first:end], whole.labels[:, first:end]
    if borders is None:
        return Inputs(ids, labels, None, None, first > 0, end < tokens)
    inside = borders[(borders > first) & (borders < end)] - first
    own = borders.new_tensor([0, *inside.tolist(), end - first])
    continues, unfinished = (not bool((borders == place).any()) for place in (first, end))
    return Inputs(ids, labels, own, None, continues, unfinished)


def _uncounted(whole: Inputs) -> Inputs:
    ids = whole.ids[:, :1]
    borders = None if whole.cu_seqlens is None else whole.cu_seqlens.new_tensor([0, 1])
    return Inputs(ids, whole.labels.new_full(ids.shape, IGNORE), borders)
