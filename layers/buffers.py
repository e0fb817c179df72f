"""Memory that decoding appends to in place."""

from __future__ import annotations

import torch
from torch import Tensor


class GrowingBuffer:
    """A buffer `[B, capacity, ...]` that decoding appends to in place; it doubles when full."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.start = self.end = 0

    def append(self, kept: Tensor, new: Tensor) -> Tensor:
        """`kept` followed by `new` along axis 1; `kept` is what the last call returned, at first anything."""
        count = new.shape[1]
        buffer = self.buffer
        if buffer is None or self.end + count > buffer.shape[1] or is_frozen(buffer):
            self.buffer = buffer = with_room(kept, 2 * (kept.shape[1] + count), 1)
            self.start, self.end = 0, kept.shape[1]
        buffer[:, self.end : self.end + count] = new
        self.end += count
        return buffer[:, self.start : self.end]

    def keep_last(self, count: int) -> Tensor:
        """Forget all but the last `count` rows."""
        assert self.buffer is not None
        self.start = self.end - count
        return self.buffer[:, self.start : self.end]


def with_room(kept: Tensor, room: int, axis: int) -> Tensor:
    """Copy `kept` to the start of a buffer of zeros that has room for `room` entries along `axis`."""
    shape = list(kept.shape)
    shape[axis] = room
    buffer = kept.new_zeros(shape)
    buffer.narrow(axis, 0, kept.shape[axis]).copy_(kept)
    return buffer


def is_frozen(buffer: Tensor) -> bool:
    """Whether inference mode made `buffer` and it is off now, so that nothing may be written into it."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()
