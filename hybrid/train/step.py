"""One optimizer step over all micro-batches and ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid.distributed.context_parallel import Piece, SequenceRanks
from hybrid.distributed.signals import Signals
from hybrid.distributed.world import World
from hybrid.model.head import IGNORE

from .engine import Engine, Update
from .tbptt import Carried, cut

if TYPE_CHECKING:
    from hybrid.data.batch import Batch


@dataclass(frozen=True)
class Step:
    """What came of a step; equal on all ranks but for `batches`."""

    loss: float
    """Nats per counted token over the whole step."""
    loss_largest: float
    """The largest of the ranks' own means."""
    z: float
    """Mean of logsumexp(logits)^2 per counted token."""
    tokens: int
    """Ids read."""
    checksum: int
    """Of the ids read, whatever rank and micro-batch they were in."""
    waited: float
    """Seconds the slowest rank waited for data."""
    bad_ranks: tuple[int, ...]
    """Those with a loss that was not finite."""
    update: Update
    stop: bool
    """A rank was asked to save and stop."""
    save: bool
    batches: list[Batch]
    """This rank's; whole, also where it has a chunk of them."""


def take(
    engine: Engine,
    world: World,
    batches: list[Batch],
    signals: Signals,
    *,
    z_loss: float = 0.0,
    tbptt_chunks: int = 1,
    waited: float = 0.0,
    sharing: SequenceRanks | None = None,
    between: Callable[[int], object] = lambda passes: None,
) -> Step:
    """Forward and backward over this rank's micro-batches, and the update.

    Each rank's and pass's sum of token losses is weighted by (ranks * passes / counted tokens of the step),
    which undoes DeepSpeed's means over both: the gradient is that of one large batch's mean, however the
    tokens are spread.

    Args:
        batches: one a micro-batch.
        z_loss: weight of the mean of logsumexp(logits)^2 in the objective.
        tbptt_chunks: passes in which a micro-batch is read, see `pieces`.
        waited: seconds this rank waited for the batches.
        sharing: the ranks that read the same batches, each to train on its chunk of them.
        between: called by all ranks after every pass but the last, with the number of passes made.
    """
    sharing = sharing or SequenceRanks()
    shares = [sharing.piece(batch) for batch in batches]
    counted = sum(int((share.labels != IGNORE).sum()) for share in shares)
    seen = sum(share.ids.numel() for share in shares)
    facts = world.gather_numbers([counted, seen, signals.stop, signals.save])
    signals.save = False
    total = max(1.0, float(facts[:, 0].sum()))
    checksum = sum(map(checksum_of, batches)) % 2**32 if sharing.main else 0
    passes = [piece for share in shares for piece in cut(share, tbptt_chunks)]
    weight, facts_of_rank = world.size * len(passes) / total, (float(checksum), waited)
    ranks, update = _forward_backward(engine, world, passes, weight, z_loss, facts_of_rank, between)
    losses = ranks[:, 0]
    return Step(
        loss=float(losses.sum()) / total,
        loss_largest=float((losses / facts[:, 0].clamp(min=1)).max()),
        z=float(ranks[:, 1].sum()) / total,
        tokens=int(facts[:, 1].sum()),
        checksum=int(ranks[:, 2].sum()) % 2**32,
        waited=float(ranks[:, 3].max()),
        bad_ranks=tuple((~losses.isfinite()).nonzero().flatten().tolist()),
        update=update,
        stop=bool(facts[:, 2].any()),
        save=bool(facts[:, 3].any()),
        batches=batches,
    )


def _forward_backward(
    engine: Engine,
    world: World,
    passes: list[Piece],
    weight: float,
    z_loss: float,
    facts: tuple[float, ...],
    between: Callable[[int], object],
) -> tuple[Tensor, Update]:
    """Every rank's `[sum of losses, sum of squared logsumexp, *facts]`, and the update."""
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    carried = Carried()
    for number, piece in enumerate(passes[:-1], 1):
        engine.backward(_objective(engine, world, piece, carried, z_loss, sums) * weight)
        between(number)
    last = _objective(engine, world, passes[-1], carried, z_loss, sums)
    ranks = world.gather_numbers([*sums.tolist(), *facts])
    finite = bool(ranks[:, 0].isfinite().all())
    update = engine.backward(last * weight, poisoned=not finite)
    assert update is not None, "the engine accumulates another number of passes"
    return ranks, update


def _objective(
    engine: Engine, world: World, piece: Piece, carried: Carried, z_loss: float, sums: Tensor
) -> Tensor:
    """The piece's sum to differentiate; adds to the running sums of loss and z."""
    out = carried.read(engine.forward, piece, world.device, z_loss=z_loss)
    sums += torch.stack([out.total.detach(), out.z_total.detach()])
    return out.total + z_loss * out.z_total if z_loss else out.total


def checksum_of(batch: Batch) -> int:
    """Sum of the CRC-32s of the stretches of documents in a batch: over a step the same, however its windows
    are spread over micro-batches and ranks."""
    return sum(zlib.crc32(part.numpy().tobytes()) for part in _stretches(batch))


def _stretches(batch: Batch) -> Iterator[Tensor]:
    yield from batch.ids.flatten().split([segment.length for segment in batch.segments])


def describe(batch: Batch) -> str:
    """Where a batch was read from."""
    pieces = [f"{part.source}[{part.document}] from id {part.offset}" for part in batch.segments]
    more = f" and {len(pieces) - 4} more" if len(pieces) > 4 else ""
    return f"the windows from sample {batch.first_sample}, documents {', '.join(pieces[:4])}{more}"
