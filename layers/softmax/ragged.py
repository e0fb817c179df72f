"""Attention of equal rows of queries over keys of different numbers, which lie behind each other.

Shapes: q `[R, T, H, D]`; k and v `[K, G, D]`, of which every row has its own stretch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..indices import on_device
from . import flash, kernels
from .kernels import Mask, Tensors

VARLEN = ("cuda", *flash.MODULES)
"""Kernels for which torch's CUDA operator takes all rows in one call; others go from length to length."""


class Ragged(NamedTuple):
    """How many keys each row of queries has."""

    lengths: tuple[int, ...]
    ends: Tensor
    """Row r has the keys from `ends[r]` to `ends[r + 1]`: int32 `[R + 1]` on the device."""
    query_ends: Tensor
    """The same of queries: multiples of T."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def runs(self) -> Iterator[tuple[slice, slice, int]]:
        """Yield stretches of rows with equally many keys: the rows, their keys, how many each row has."""
        row = key = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield slice(row, row + count), slice(key, key + count * length), length
            row, key = row + count, key + count * length

    def together(self, kernel: str) -> bool:
        """Whether one call of that kernel is to take rows of different lengths."""
        return kernel in VARLEN and self.lengths[0] < self.longest  # slots never get fewer


def ragged(lengths: Sequence[int], tokens: int, device: torch.device) -> Ragged:
    """Describe rows of `tokens` queries with so many keys each."""
    ends = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    query_ends = torch.arange(len(lengths) + 1, dtype=torch.int32) * tokens
    return Ragged(tuple(lengths), on_device(ends, device), on_device(query_ends, device))


def forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, rows: Ragged, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp as `kernels.forward` does."""
    if rows.together(kernel):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q.flatten(0, 1), k, v, rows.query_ends, rows.ends, q.shape[1], rows.longest, 0.0, False, False,
            scale=scale,
        )  # fmt: skip
        return out.view(q.shape), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    parts = [
        kernels.forward(kernel, q[own], *_rows(k, v, keys, length), Mask.FULL, scale)
        for own, keys, length in rows.runs()
    ]
    out, lse = (torch.cat(found) if len(found) > 1 else found[0] for found in zip(*parts, strict=True))
    return out, lse


def backward(
    kernel: str, joint: Tensors, q: Tensor, k: Tensor, v: Tensor, rows: Ragged, scale: float
) -> Tensors:
    """Compute gradients of q, k and v as `kernels.backward` does."""
    grad, out, lse = joint
    if rows.together(kernel):
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            grad.flatten(0, 1), q.flatten(0, 1), k, v, out.flatten(0, 1), lse.transpose(0, 1).flatten(1),
            rows.query_ends, rows.ends, q.shape[1], rows.longest, 0.0, False, unused, unused, scale=scale,
        )  # fmt: skip
        return d_q.view(q.shape), d_k, d_v
    parts = []
    for own, keys, length in rows.runs():
        part = kernels.backward(
            kernel, (grad[own], out[own], lse[own]), q[own], *_rows(k, v, keys, length), Mask.FULL, scale
        )
        parts.append((part[0], part[1].flatten(0, 1), part[2].flatten(0, 1)))
    d_q, d_k, d_v = (torch.cat(found) if len(found) > 1 else found[0] for found in zip(*parts, strict=True))
    return d_q, d_k, d_v


def _rows(k: Tensor, v: Tensor, keys: slice, length: int) -> tuple[Tensor, Tensor]:
    """View keys and values of rows with equally many as `[r, length, G, D]`."""
    return k[keys].unflatten(0, (-1, length)), v[keys].unflatten(0, (-1, length))
