"""The endless stream of a source's training documents: epoch after epoch, each shuffled anew.

Everything is computed from the seed, so any place of the stream can be read without reading what is before.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid.data.preparation.shards import content_hash

from .batch import IGNORE, Row, Segment
from .store import SourceStore

ENDLESS = 1 << 48
"""Rows in a stream: more than anybody reads, few enough for exact arithmetic on them."""


def derived_seed(*parts: object) -> int:
    """Derive a seed of 64 bits for a purpose."""
    return content_hash(repr(parts).encode())


def shuffled(count: int, seed: int, name: str, epoch: int) -> NDArray[np.int64]:
    """Permute `count` documents: sorted by splitmix64 of their numbers, keyed by the rest.

    Own arithmetic rather than numpy's generator, whose streams may change between versions.
    """
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(derived_seed(seed, name, epoch))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")


class _Epochs:
    """The source's training documents, shuffled for each epoch, as one endless stream of units.

    `sizes`: units of each training document (ids, or segments).
    """

    def __init__(
        self, source: SourceStore, documents: NDArray[np.int64], sizes: NDArray[np.int64], seed: int
    ) -> None:
        self.total = int(sizes.sum())
        self._source, self._documents, self._sizes, self._seed = source, documents, sizes, seed
        self._epoch = lru_cache(maxsize=4)(self._shuffle)  # few, as each holds all documents

    def find(self, place: int) -> tuple[int, int, int]:
        """Find a place of the stream: (epoch, document, place within the document)."""
        epoch, rest = divmod(place, self.total)
        order, ends = self._epoch(epoch)
        at = int(np.searchsorted(ends, rest, side="right"))
        document = int(order[at])
        return epoch, int(self._documents[document]), rest - int(ends[at] - self._sizes[document])

    def _shuffle(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shuffle an epoch's documents; returns them and the running sums of their sizes."""
        order = shuffled(len(self._documents), self._seed, self._source.name, epoch)
        return order, np.cumsum(self._sizes[order])


class ShuffledRows:
    """Row r is ids `[r*T, (r+1)*T)` of the stream, whatever documents they belong to.

    So every stored id is an input once and a label once an epoch; a row that an epoch's end cuts is filled
    from the next epoch, and nothing is dropped. `respect`: the label is -100 where the next id begins another
    document; otherwise every label counts.
    """

    def __init__(self, source: SourceStore, context: int, seed: int, respect: bool) -> None:
        documents = np.flatnonzero(~source.held_out)
        self._epochs = _Epochs(source, documents, source.tokens[documents], seed)
        self._source, self._context, self._respect = source, context, respect
        self.in_a_pass = max(1, self._epochs.total // context)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, row: int) -> Row:
        wanted = self._context + 1  # the last input's label belongs to the next row
        place = int(row) * self._context
        stream = np.empty(wanted, np.int64)
        segments, ends, filled = [], [], 0
        while filled < wanted:
            epoch, document, offset = self._epochs.find(place + filled)
            size = int(self._source.tokens[document])
            length = min(wanted - filled, size - offset)
            stream[filled : filled + length] = self._source.read(document, offset, offset + length)
            if filled < self._context:
                inputs = min(length, self._context - filled)
                segments.append(Segment(self._source.name, document, offset, inputs, epoch))
                if offset + inputs == size:
                    ends.append(filled + inputs - 1)
            filled += length
        labels = stream[1:].copy()
        if self._respect:
            labels[ends] = IGNORE
        return Row(stream[:-1].copy(), labels, tuple(segments))


class OrderedRows:
    """Ordered mode: sample g is the next segment of the document in lane `g % lanes`.

    A segment is up to `context` inputs of one document (the last may be shorter; the end id is a label only).
    A source's stream of segments is dealt to its lanes in shares of one epoch / lanes each, so that lane k
    reads share k, then share k + lanes, and so on: segments of one document follow each other in one lane,
    but where a share begins (`fresh`) a document may be cut over two lanes. Lanes go to sources by weight, at
    least one each.
    """

    def __init__(self, sources: list[SourceStore], context: int, seed: int, lanes: int) -> None:
        self._context, self._lanes = context, lanes
        self._owners: list[tuple[int, int]] = []  # lane -> (source, lane within the source)
        self._sources, self._counts, self._epochs = sources, apportion([s.weight for s in sources], lanes), []
        for number, source in enumerate(sources):
            self._owners += [(number, lane) for lane in range(self._counts[number])]
            documents = np.flatnonzero(~source.held_out)
            segments = -(-(source.tokens[documents] - 1) // context)
            self._epochs.append(_Epochs(source, documents, segments, seed))

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, sample: int) -> Row:
        turn, lane = divmod(int(sample), self._lanes)
        number, lane = self._owners[lane]
        source, epochs, lanes = self._sources[number], self._epochs[number], self._counts[number]
        share = -(-epochs.total // lanes)
        trip, step = divmod(turn, share)
        epoch, document, segment = epochs.find((trip * lanes + lane) * share + step)
        fresh = segment == 0 or step == 0
        length = int(source.tokens[document]) - 1 - segment * self._context
        return source.row(document, segment * self._context, min(self._context, length), epoch, fresh)


def apportion(weights: list[float], seats: int) -> list[int]:
    """Share out whole `seats` by weight, at least one each; needs `seats >= len(weights)`."""
    assert seats >= len(weights)
    exact = [weight / sum(weights) * seats for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) != seats:
        step = 1 if sum(shares) < seats else -1
        candidates = [i for i in range(len(weights)) if step > 0 or shares[i] > 1]
        best = max(candidates, key=lambda i: step * (exact[i] - shares[i]))
        shares[best] += step
    return shares
