"""Batches for training: the same global batches for any number of processes, from one global sample number.

A sample is one row. Global batch i of B rows is samples `[i*B, (i+1)*B)`, whichever processes read them. Rows
cut each source's shuffled documents (see `order`), are read in shuffled order within a pass, so that a batch
is not one document, and sources are mixed by weight row by row (shares hold to 1 %). All of it has random
access (grain's `MapDataset`), so to go on, one number is enough.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection

from .batch import Batch, collate
from .order import OrderedRows, ShuffledRows, derived_seed
from .store import Store


class Loader(Iterator[Batch]):
    """Reads this process' rows, `sequences` of them per `next()`.

    `rank` of `world` processes get neighbouring slices: together one `next()` on each reads
    `sequences * world` samples in a row from `start_sample`. `lanes` (ordered mode only): documents read
    side by side; set it to the rows of a whole optimizer step when gradients are accumulated, so that
    batches do not depend on how a step is cut. Raises DataError when the folder or the settings cannot be
    used.

    boundaries respect: one packed row `[1, sequences * context]` whose `cu_seqlens` begin anew at every
    document and every row; cross: `[sequences, context]`, every label counts (also a document's begin id
    after the end id of the one before). Ordered mode: one packed row of segments, at most `context` ids each.

    Attributes: `vocab_size`, `fingerprint` (tokenizer), `sample` (the global number to go on from).
    """

    def __init__(
        self,
        data: DataSection,
        *,
        seed: int,
        sequences: int,
        rank: int = 0,
        world: int = 1,
        start_sample: int = 0,
        lanes: int | None = None,
    ) -> None:
        _check(data, sequences, rank, world, start_sample)
        self.store = Store(data)
        self.vocab_size, self.fingerprint = self.store.vocab_size, self.store.fingerprint
        self.packed = data.boundaries == "respect"  # also in ordered mode, see `_check`
        self._sequences, self._rank, self._world, self._start = sequences, rank, world, start_sample
        self._taken = 0
        dataset = _dataset(data, self.store, seed, lanes or sequences * world)
        grain = _grain()
        mine = dataset[start_sample:].batch(sequences, batch_fn=list)[rank::world]
        options = grain.ReadOptions(num_threads=data.workers, prefetch_buffer_size=2 * data.workers)
        self._rows = iter(mine.to_iter_dataset(options))

    @property
    def sample(self) -> int:
        """The global number of the next sample that no process has read."""
        return self._start + self._taken * self._sequences * self._world

    def __next__(self) -> Batch:
        first = self.sample + self._rank * self._sequences
        batch = collate(next(self._rows), self.packed, first)
        self._taken += 1
        return batch

    def close(self) -> None:
        """Stop the reading threads."""
        self._rows.close()


def _dataset(data: DataSection, store: Store, seed: int, lanes: int) -> Any:
    """Make all samples in global order a grain dataset with random access."""
    grain = _grain()
    sources = [source for source in store.sources.values() if not source.held_out.all()]
    if not sources:
        raise DataError("every document is held out for validation; lower the sources' validation shares")
    if data.order == "document":
        if lanes < len(sources):
            raise DataError(
                f"data.order document reads every source in lanes of its own: {len(sources)} sources need "
                f"a batch of at least that many sequences, not {lanes}"
            )
        return grain.MapDataset.source(OrderedRows(sources, data.context, seed, lanes))
    streams = []
    for source in sources:
        rows = ShuffledRows(source, data.context, seed, respect=data.boundaries == "respect")
        streams.append(
            grain.experimental.WindowShuffleMapDataset(
                grain.MapDataset.source(rows),
                window_size=rows.in_a_pass,
                # grain takes seeds below 2^32 and adds one a pass
                seed=derived_seed(seed, source.name, "windows") >> 33,
            )
        )
    return grain.MapDataset.mix(streams, [float(source.weight) for source in sources])


def _check(data: DataSection, sequences: int, rank: int, world: int, start_sample: int) -> None:
    for name, allowed in (("boundaries", ("respect", "cross")), ("order", ("shuffle", "document"))):
        if getattr(data, name) not in allowed:
            raise DataError(f"data.{name} is {getattr(data, name)!r}; allowed: {', '.join(allowed)}")
    if data.order == "document" and data.boundaries == "cross":
        raise DataError("data.order document keeps documents apart; it needs data.boundaries respect")
    positive = (("data.context", data.context, 1), ("sequences", sequences, 1))
    for name, value, least in (
        *positive,
        ("data.workers", data.workers, 0),
        ("start_sample", start_sample, 0),
    ):
        if value < least:
            raise DataError(f"{name} is {value}; it must be {least} or more")
    for name, source in data.sources.items():
        if not 0 < source.weight < math.inf:
            raise DataError(f"data.sources.{name}.weight is {source.weight}; it must be a number above 0")
    if not 0 <= rank < world:
        raise DataError(f"rank {rank} of {world} processes; ranks are 0 to {world - 1}")


def _grain() -> Any:
    """Import the package without its warning that a profiler for JAX is missing."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import grain
    finally:
        logger.setLevel(level)
    return grain
