"""The KVM walk as Triton kernels: routing, sums and reading of all chunks of a group in a few launches.

Imports triton, so import this package only where kernels are asked for. Environment `TRITON_INTERPRET=1`, set
before that, runs them on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contributions import Norm, Sums
from ..spec import KVMSpec
from .routing import route_group
from .states import read_group, read_group_backward

if TYPE_CHECKING:
    from ..steps import Steps

__all__ = ["States", "read_group", "read_group_backward", "route_group"]


class States:
    """The same as `..parallel.States`."""

    def __init__(
        self, before: Sums, added: Sums, slot: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
    ) -> None:
        if steps.keys is None:  # nobody reads
            table = steps.table.clone()
            table[:, 3] = 0
            steps = steps._replace(readers=(0,) * len(steps.readers), table=table)
        self.group = before, added, slot, steps, spec, norm
        self.made: tuple[Tensor, Tensor, Sums] | None = None

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute keys and values that queries meet, `[K, G, D]`."""
        self.made = read_group(*self.group, dtype)
        return self.made[:2]

    def last(self) -> Sums:
        """Return the sums after the last update, `[n, G, S, ...]`."""
        return (self.made or read_group(*self.group, torch.float32))[2]

    def backward(
        self, read: tuple[Tensor, Tensor] | None, last: Sequence[Tensor | None], d_norm: Norm
    ) -> tuple[Sums, Sums]:
        """Return gradients of `before` and `added`; add to the norm's."""
        before, _, slot, *_ = self.group
        nothing = before.keys.new_empty(0, slot.shape[1], before.keys.shape[3])
        d_before, d_added, own = read_group_backward(*self.group, *(read or (nothing, nothing)), last)
        for total, share in zip(d_norm, own, strict=True):
            total += share
        return d_before, d_added
