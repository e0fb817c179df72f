"""The ranks that share sequences (`parallel.sequence`): who they are, and what each holds of a batch.

Neighbouring ranks form a group: they read the same windows, and each trains on its chunk of them. DeepSpeed
is not told; to it they are data-parallel ranks, whose gradients it sums like all others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.layers.context_parallel import SequenceShard

from .world import COLLECTIVE_TIMEOUT, World

if TYPE_CHECKING:
    from hybrid.data.batch import Batch


class Piece(NamedTuple):
    """What one rank gives the model of a batch in one pass."""

    ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None
    """None where the rows are sharded: the shard knows the documents."""
    shard: SequenceShard | None = None
    goes_on: bool = False
    """Its rows, or a packed row's first document, go on from the piece before (see `pieces`)."""
    unfinished: bool = False
    """The next piece goes on with its rows, or with a packed row's last document."""

    def to(self, device: torch.device) -> Piece:
        borders = None if self.cu_seqlens is None else self.cu_seqlens.to(device)
        return self._replace(ids=self.ids.to(device), labels=self.labels.to(device), cu_seqlens=borders)

    def arguments(self) -> dict[str, Any]:
        """The model's keyword arguments beside the ids."""
        keep = self.unfinished
        return {"labels": self.labels, "cu_seqlens": self.cu_seqlens, "shard": self.shard, "want_state": keep}


def whole(batch: Batch) -> Piece:
    """All of a batch."""
    return Piece(batch.ids, batch.labels, batch.cu_seqlens)


@dataclass(frozen=True)
class SequenceRanks:
    """This process' place among those that share sequences; by default it has its own."""

    group: Any = None
    rank: int = 0
    size: int = 1
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes this rank has sent to share sequences, by operation."""

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

    @property
    def main(self) -> bool:
        """The one that counts what its group reads together."""
        return self.rank == 0

    def piece(self, batch: Batch) -> Piece:
        """This rank's chunk of a batch that all ranks of the group read."""
        if self.size == 1:
            return whole(batch)
        lengths = () if batch.cu_seqlens is None else tuple(batch.cu_seqlens.diff().tolist())
        shard = SequenceShard(self.group, self.rank, self.size, batch.ids.shape[1], lengths, self.sent)
        return Piece(batch.ids[:, shard.span], batch.labels[:, shard.span], None, shard)
