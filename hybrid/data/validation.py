"""Held-out documents in a fixed order, for a loss in bits per byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection

from .batch import IGNORE, Batch, collate
from .store import SourceStore, Store

SHARE_OF_ONE = 16
"""Under a cap of c ids no document gives more than c / 16 of them (but always a whole row)."""

Place = tuple[SourceStore, tuple[int, int, int]]
"""A segment: its source; document, offset and length."""


class ValidationSet:
    """The held-out documents of all sources, ordered by content hash (a fixed mix of the sources).

    Each document is scored from its start in segments of `context` inputs, which do not see each other. Its
    text's ids and its end id are labels, so the sum of the losses is a code length of the text:
    bits per byte = total nats / ln 2 / `bytes`.

    `tokens` caps the labels: documents are taken in order until it is reached, at most a sixteenth of it (or
    one segment) from each, cut ones as a prefix. `bytes` counts exactly the UTF-8 bytes whose ids are labels;
    `raw_bytes()` are those bytes. Iterating gives this rank's Batches, packed rows of up to
    `sequences * context` ids; all ranks get the same number, surplus ones with every label -100.

    Attributes: `documents` (count), `bytes`, `tokens` (labels), `vocab_size`, `fingerprint` (tokenizer),
    `text_fingerprint` (of what is scored), `store`.
    """

    def __init__(
        self,
        data: DataSection,
        tokens: int | None = None,
        *,
        sequences: int = 8,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 0 <= rank < world or min(sequences, data.context, 1 if tokens is None else tokens) < 1:
            raise DataError(
                f"validation needs rank < world, sequences, context and tokens of 1 or more; got rank {rank} "
                f"of {world}, sequences {sequences}, context {data.context}, tokens {tokens}"
            )
        self.store = store = Store(data)
        self.vocab_size, self.fingerprint = store.vocab_size, store.fingerprint
        self._tokenizer = store.tokenizer
        self._context, self._room = data.context, sequences * data.context
        self._rank, self._world = rank, world
        self._chosen = _choose(list(store.sources.values()), tokens, data.context)
        self.documents = len(self._chosen)
        self.tokens = sum(count for _, _, count in self._chosen)
        self.bytes = sum(self._count_bytes(*chosen) for chosen in self._chosen)
        self._batches = self._pack()
        scored = [(int(source.hashes[document]), count) for source, document, count in self._chosen]
        self.text_fingerprint = hashlib.sha256(json.dumps(scored).encode()).hexdigest()

    def __len__(self) -> int:
        """Count the batches of each rank."""
        return -(-len(self._batches) // self._world)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self._rank, len(self) * self._world, self._world):
            surplus = number >= len(self._batches)
            first, rows = self._batches[0 if surplus else number]
            batch = collate([source.row(*place) for source, place in rows], packed=True, first_sample=first)
            if surplus:
                batch.labels.fill_(IGNORE)
            yield batch

    def arrays(self) -> Iterator[NDArray[np.int64]]:
        """Read the ids of each scored document: begin id, text, and its end id unless it was cut."""
        for source, document, count in self._chosen:
            yield source.read(document, 0, count + 1).astype(np.int64)

    def texts(self) -> Iterator[bytes]:
        """Decode the scored bytes of each document (a cut one may end inside a character)."""
        for ids in self.arrays():
            yield self._tokenizer.decode_bytes(ids.tolist())

    def raw_bytes(self) -> bytes:
        """Join all scored bytes, `bytes` in number."""
        return b"".join(self.texts())

    def _count_bytes(self, source: SourceStore, document: int, count: int) -> int:
        if count + 1 == source.tokens[document]:
            return int(source.bytes[document])
        return len(self._tokenizer.decode_bytes(source.read(document, 0, count + 1).tolist()))

    def _pack(self) -> list[tuple[int, list[Place]]]:
        """Put segments into batches: (number of the first, segments); neighbours share one if they fit."""
        batches: list[tuple[int, list[Place]]] = []
        free, number = 0, 0
        for source, document, count in self._chosen:
            for offset in range(0, count, self._context):
                length = min(self._context, count - offset)
                if length > free:
                    batches.append((number, []))
                    free = self._room
                batches[-1][1].append((source, (document, offset, length)))
                free -= length
                number += 1
        return batches


def _choose(sources: list[SourceStore], cap: int | None, context: int) -> list[tuple[SourceStore, int, int]]:
    """Choose what is scored: (source, document, labels) in order."""
    found = [
        (int(source.hashes[document]), number, int(document))
        for number, source in enumerate(sources)
        for document in np.flatnonzero(source.held_out)
    ]
    left = 1 << 62 if cap is None else cap
    most = max(context, left // SHARE_OF_ONE)
    chosen = []
    for _, number, document in sorted(found):
        count = min(int(sources[number].tokens[document]) - 1, most, left)
        left -= count
        if count:
            chosen.append((sources[number], document, count))
    return chosen
