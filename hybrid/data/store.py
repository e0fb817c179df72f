"""Reading a prepared folder: documents as arrays of ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid.data.preparation.report import read_report
from hybrid.data.preparation.shards import BYTES, HASH, IDS, TokenFile, fingerprint_of, held_out, open_shard
from hybrid.errors import DataError
from hybrid.files import damaged
from hybrid.recipe.schema import DataSection, SourceSection

from .batch import Row, Segment
from .tokenizer import Tokenizer


class SourceStore:
    """The stored documents of one source, numbered in the order of their files.

    Attributes, one entry per document: `tokens` (stored ids), `bytes` (UTF-8), `hashes`, `held_out`;
    `fingerprint` (of them all, in order), `files` (of ids).
    """

    def __init__(
        self, folder: Path, name: str, section: SourceSection, shards: list[str], tokenizer: str
    ) -> None:
        self.name = name
        self.weight = section.weight
        indices, places = [], []
        self.files: list[TokenFile] = []
        for number, shard in enumerate(shards):
            index, file = open_shard(folder, name, shard, tokenizer)
            lengths = index[:, IDS].astype(np.int64)
            indices.append(index)
            places.append(np.stack([np.full(len(index), number), np.cumsum(lengths) - lengths], 1))
            self.files.append(file)
        index = np.concatenate(indices)
        self.fingerprint = fingerprint_of(index)
        self._places = np.concatenate(places)  # a document's shard, and its first id there
        self.tokens = index[:, IDS].astype(np.int64)
        self.bytes = index[:, BYTES].astype(np.int64)
        self.hashes = index[:, HASH]
        self.held_out = held_out(self.hashes, section.validation)

    def read(
        self, document: int, start: int = 0, stop: int | None = None
    ) -> NDArray[np.unsignedinteger[Any]]:
        """Read stored ids `[start, stop)` of one document (begin id, text, end id)."""
        shard, first = self._places[document]
        stop = int(self.tokens[document]) if stop is None else stop
        assert 0 <= start <= stop <= self.tokens[document]
        return _mapped(self.files[shard])[first + start : first + stop]

    def row(self, document: int, offset: int, length: int, epoch: int = 0, fresh: bool = True) -> Row:
        """Read a row of one segment: `length` inputs of a document from `offset` on."""
        ids = self.read(document, offset, offset + length + 1).astype(np.int64)
        return Row(ids[:-1], ids[1:], (Segment(self.name, document, offset, length, epoch, fresh),))


class Store:
    """A prepared folder. Raises DataError when it is not there, not finished, or does not fit together.

    Attributes: `vocab_size`, `fingerprint` (the tokenizer's), `sources` by name.
    """

    def __init__(self, data: DataSection) -> None:
        self.folder = Path(data.folder)
        path = self.folder / "report.json"
        report = read_report(path)
        self.tokenizer = Tokenizer.load(self.folder / "tokenizer.model")
        self.fingerprint: str = report["tokenizer"]
        self.vocab_size: int = report["vocab_size"]
        if self.tokenizer.fingerprint != self.fingerprint:
            found, wanted = self.tokenizer.fingerprint[:12], self.fingerprint[:12]
            raise DataError(
                f"{self.folder}/tokenizer.model ({found}) is not what the shards were made with ({wanted}); "
                "put that back or prepare again with --force"
            )
        if self.vocab_size != self.tokenizer.vocab_size:
            raise damaged(path, f"vocab_size is {self.vocab_size}, the model's {self.tokenizer.vocab_size}")
        self.sources: dict[str, SourceStore] = {}
        for name, section in data.sources.items():
            if name not in report["sources"]:
                known = ", ".join(report["sources"])
                raise DataError(
                    f"source {name!r} is not in {self.folder} (there: {known}); run `hybrid prepare`"
                )
            entry = report["sources"][name]
            source = SourceStore(self.folder, name, section, entry["shards"], self.fingerprint)
            if entry.get("fingerprint", source.fingerprint) != source.fingerprint:
                raise damaged(path, f"the shards of source {name!r} are not those, or in the order, it is of")
            self.sources[name] = source
        if not self.sources:
            raise DataError("data.sources is empty; name at least one source with its paths")

    def describe(self) -> dict[str, dict[str, Any]]:
        """Describe what is trained on, equal on any machine: each source's documents, which of them are held
        out, and its weight."""
        return {
            name: {
                "documents": len(source.tokens),
                "tokens": int(source.tokens.sum()),
                "fingerprint": source.fingerprint,
                "held_out": int(source.held_out.sum()),
                "held_out_fingerprint": hashlib.sha256(np.packbits(source.held_out).data).hexdigest(),
                "weight": float(source.weight),
            }
            for name, source in self.sources.items()
        }


def train_tokens(data: DataSection, every: int = 1) -> Iterator[NDArray[np.unsignedinteger[Any]]]:
    """Read the stored ids of every training document, or of each source's first and every `every`-th after it
    (begin id, text, end id), source by source."""
    for source in Store(data).sources.values():
        for document in np.flatnonzero(~source.held_out)[::every]:
            yield source.read(int(document))


@lru_cache(maxsize=256)  # open files, well below the usual limit of 1024
def _mapped(file: TokenFile) -> NDArray[np.unsignedinteger[Any]]:
    stat = Path(file.path).stat()
    made_anew = (stat.st_ino, stat.st_mtime_ns) != (file.inode, file.changed)
    if made_anew and (file.sha256 is None or file.fault() is not None):
        raise DataError(f"{file.path} was replaced while it was read: its folder was prepared anew")
    if stat.st_size == 0:
        return np.zeros(0, np.dtype(file.dtype))
    return np.memmap(file.path, np.dtype(file.dtype), "r")
