"""One optimizer step over all micro-batches and ranks."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.data.batch import Batch
from hybrid.distributed.context_parallel import ALONE, Inputs, SequenceRanks
from hybrid.distributed.world import World
from hybrid.errors import TrainError
from hybrid.model.head import IGNORE

from . import tbptt
from .distill import CROSS_ENTROPY, Objective
from .engine import Engine, Update


@dataclass(frozen=True)
class StepResult:
    """What came of a step; equal on all ranks but for `batches`."""

    loss: float
    """The objective per counted token over the whole step (nats, unless blocks are aligned); not a number
    when none is counted."""
    loss_largest: float
    """The largest of the ranks' own means."""
    parts: dict[str, float]
    """The losses that it is the weighted sum of, in nats or relative, per counted token."""
    z: float
    """Mean of logsumexp(logits)^2 per counted token."""
    tokens: int
    """Ids read."""
    empty: bool
    """No rank has a counted token: there is nothing to learn, and the weights stay."""
    checksum: int
    """Sum over the ids read, whatever rank and micro-batch they were in; see `checksum_of`."""
    waited: float
    """Seconds the slowest rank waited for data."""
    bad_ranks: tuple[int, ...]
    """Those with a loss that was not finite."""
    update: Update
    batches: list[Batch]
    """This rank's; whole, also where it has a shard of them."""


class Step:
    """A step in the making: `forward` and `backward` on every one of `passes` in order, then `update`.

    Each rank's and pass's sum of token losses is weighted by (ranks * passes / counted tokens of the step),
    which undoes DeepSpeed's means over both: the gradient is that of one large batch's mean, however the
    tokens are spread. Every method is called by all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        world: World,
        batches: list[Batch],
        *,
        ranks: SequenceRanks = ALONE,
        objective: Objective = CROSS_ENTROPY,
        tbptt_chunks: int = 1,
        waited: float = 0.0,
    ) -> None:
        """Share out the batches, one a micro-batch.

        Args:
            ranks: those that read the same batches, each to train on its shard of them.
            objective: what is made small.
            tbptt_chunks: passes in which a micro-batch is read.
            waited: seconds this rank waited for the batches.
        """
        self._engine, self._world, self._batches, self._objective = engine, world, batches, objective
        shards = [ranks.shard(batch) for batch in batches]
        counted = sum(int((shard.labels != IGNORE).sum()) for shard in shards)
        seen = sum(shard.ids.numel() for shard in shards)
        counts = world.gather_numbers([counted, seen])
        self._counted, self._seen = counts[:, 0], int(counts[:, 1].sum())
        self._total = float(self._counted.sum())
        self._facts = (sum(map(checksum_of, batches)) % 2**32 if ranks.rank == 0 else 0, waited)
        if not self._total:
            # The optimizer would still move the weights, by momentum and decay: any loss will do to be made
            # a non-finite gradient, for which all ranks leave the step out.
            shards = [shard._replace(labels=shard.ids) for shard in shards]
        self.passes = [chunk for shard in shards for chunk in tbptt.chunks(shard, tbptt_chunks)]
        self._passes_left = len(self.passes)
        self._reader = tbptt.ChunkReader(engine.forward, world.device)
        self._sums = torch.zeros(1, dtype=torch.float64, device=world.device)
        self._of_ranks = torch.zeros(world.size, 1, dtype=torch.float64)
        self._parts: list[str] = []

    def forward(self, inputs: Inputs) -> Tensor:
        """Compute the sum to differentiate of one pass."""
        inputs = inputs.to(self._world.device)
        out = self._reader.read(inputs, **self._objective.options(inputs))
        parts, z_loss = self._objective.parts(out), self._objective.z_loss
        loss = self._objective.total(parts)
        outside = loss.new_zeros(()) if out.outside is None else out.outside
        sums = [loss.detach(), out.z_total.detach(), outside, *(part.detach() for part in parts.values())]
        self._sums, self._parts = self._sums + torch.stack(sums), list(parts)
        return loss + z_loss * out.z_total if z_loss else loss

    def backward(self, objective: Tensor) -> None:
        """Add the gradient of one pass; at the last one all ranks learn each other's losses."""
        self._passes_left -= 1
        if not self._passes_left:
            self._of_ranks = self._world.gather_numbers([*self._sums.tolist(), *self._facts])
            self._refuse_outside(self._of_ranks[:, 2])
        poisoned = not bool(self._of_ranks[:, 0].isfinite().all())
        weight = self._world.size * len(self.passes) / max(1.0, self._total)
        self._engine.backward(objective * weight, poisoned=poisoned or not self._total)

    def _refuse_outside(self, counts: Tensor) -> None:
        """Stop all ranks when some read ids that the model's vocabulary does not have."""
        if counts.any():
            own, where = int(counts[self._world.rank]), "; ".join(map(describe, self._batches))
            told = f"{own} ids or labels are outside the model's vocabulary. They are in {where}"
            self._world.raise_if_any(TrainError(told) if own else None)

    def update(self) -> StepResult:
        """Update the weights, unless a loss or the gradient is not finite, or no token is counted."""
        losses, z, _, *parts, checksums, waited = self._of_ranks.unbind(1)
        update, total = self._engine.step(), self._total or math.nan
        empty = not self._total
        return StepResult(
            loss=float(losses.sum()) / total,
            loss_largest=float((losses / self._counted.clamp(min=1)).max()),
            parts={name: float(part.sum()) / total for name, part in zip(self._parts, parts, strict=True)},
            z=float(z.sum()) / total,
            tokens=self._seen,
            empty=empty,
            checksum=int(checksums.sum()) % 2**32,
            waited=float(waited.max()),
            bad_ranks=tuple((~losses.isfinite()).nonzero().flatten().tolist()),
            update=Update(0.0, 0.0, skipped=True) if empty else update,
            batches=self._batches,
        )

    def take(self) -> StepResult:
        """Do the whole step, with nothing in between."""
        for inputs in self.passes:
            self.backward(self.forward(inputs))
        return self.update()


def checksum_of(batch: Batch) -> int:
    """Sum the CRC-32s of the segments of documents in a batch: over a step the same, however its windows are
    spread over micro-batches and ranks."""
    segments = batch.ids.flatten().split([segment.length for segment in batch.segments])
    return sum(zlib.crc32(ids.numpy().tobytes()) for ids in segments)


def describe(batch: Batch) -> str:
    """Say where a batch was read from."""
    found = [f"{segment.source}[{segment.document}] from id {segment.offset}" for segment in batch.segments]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"the windows from sample {batch.first_sample}, documents {', '.join(found[:4])}{more}"
