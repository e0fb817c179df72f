"""Index lists on the device: made once for every shape, or for every batch of packed rows, and kept.

All layers of a call, and its backward, get the same tensors. They are copied from pinned memory, so that the
host does not wait for what the device still computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made", bound=Callable[..., Any])
KEPT: list[Any] = []
"""The functions that keep what they made (see `kept`)."""


def kept(make: Made) -> Made:
    """Keep the last results of a function of hashable arguments, which nobody may write to."""

    def outside(*args: Any) -> Any:
        with torch.inference_mode(False):  # whose tensors no later backward would take
            return make(*args)

    cached = lru_cache(maxsize=64)(outside)
    cached.__doc__ = make.__doc__
    KEPT.append(cached)
    return cached  # type: ignore[return-value]


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to `device`; from the host to a GPU without waiting for that."""
    if device.type == "cuda" and x.device.type == "cpu" and torch.accelerator.is_available():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@kept
def index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """List `numbers` as int64 on `device`."""
    return on_device(torch.tensor(numbers, dtype=torch.int64), device)


@kept
def borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """List where packed documents begin, and where the last one ends: int64 `[N + 1]`."""
    return index((0, *accumulate(lengths)), device)


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """List the first token of every packed document: int64 `[N]`."""
    return borders(lengths, device)[:-1]


@kept
def ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """List the last token of every packed document: int64 `[N]`."""
    return index(tuple(end - 1 for end in accumulate(lengths)), device)


def offsets(lengths: Sequence[int], rooms: Sequence[int]) -> Tensor:
    """List for every token of packed documents its place where document i takes `rooms[i]` places: int64
    `[T]`, on the host."""
    first = torch.tensor([0, *accumulate(rooms[:-1])])
    begin = torch.tensor([0, *accumulate(lengths[:-1])])
    return torch.arange(sum(lengths)) + (first - begin).repeat_interleave(torch.tensor(lengths))
