"""Context parallelism (`parallel.sequence`): the ranks that share sequences, and each one's shard of a batch.

Neighbouring ranks form a group: they read the same windows, and each trains on its shard of them. DeepSpeed
is not told; to it they are data-parallel ranks, whose gradients it sums like all others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.data.batch import Batch
from hybrid.layers.context_parallel import SequenceShard
from hybrid.layers.indices import on_device

from .world import COLLECTIVE_TIMEOUT, World


class Inputs(NamedTuple):
    """What one forward pass takes: a rank's shard of a batch, or a tbptt chunk of it."""

    ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    """None where ranks share the rows: the shard knows the documents."""
    shard: SequenceShard | None = None
    continues: bool = False
    """Its rows, or a packed row's first document, go on from the tbptt chunk before."""
    unfinished: bool = False
    """The next tbptt chunk goes on with its rows, or with a packed row's last document."""

    def to(self, device: torch.device) -> Inputs:
        """Move ids and labels without a wait; borders stay on the host, which reads them."""
        return self._replace(ids=on_device(self.ids, device), labels=on_device(self.labels, device))

    def options(self) -> dict[str, Any]:
        """Name the model's keyword arguments beside the ids."""
        keep = self.unfinished
        return {"labels": self.labels, "cu_seqlens": self.cu_seqlens, "shard": self.shard, "want_state": keep}


@dataclass(frozen=True)
class SequenceRanks:
    """This process' place among those that share sequences; by default it has its own."""

    group: Any = None
    rank: int = 0
    size: int = 1
    sent: Counter[str] = field(default_factory=Counter)
    """Operation -> bytes this rank has sent to the others by it."""

    @classmethod
    def join(cls, world: World, size: int) -> Self:
        """Form groups of `size` neighbouring ranks, a divisor of the world's; all ranks call this."""
        if size == 1:
            return cls()
        groups = [
            dist.new_group(list(range(first, first + size)), timeout=COLLECTIVE_TIMEOUT)
            for first in range(0, world.size, size)
        ]
        return cls(groups[world.rank // size], world.rank % size, size)

    def leave(self) -> None:
        """Give the group up; all ranks of it call this."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def shard(self, batch: Batch) -> Inputs:
        """Take this rank's shard of a batch that all ranks of the group read; alone, all of it."""
        if self.size == 1:
            return Inputs(batch.ids, batch.labels, batch.cu_seqlens)
        lengths = () if batch.cu_seqlens is None else tuple(batch.cu_seqlens.diff().tolist())
        shard = SequenceShard(self.group, self.rank, self.size, batch.ids.shape[1], lengths, self.sent)
        return Inputs(batch.ids[:, shard.span], batch.labels[:, shard.span], None, shard)


ALONE = SequenceRanks()
"""A rank with sequences of its own."""
