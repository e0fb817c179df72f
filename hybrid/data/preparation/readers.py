"""Reading documents from files: one reader a format, one way to open a compression.

Text is UTF-8; a text file is one document, a JSONL line or a parquet row is one. What cannot be read (invalid
UTF-8, a line that is no object, a missing key, a lone surrogate, a cut compressed file) is an error naming
the file and the byte, line or row; with `bad_lines: skip` it is left out and counted. Empty documents are
always left out and counted.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

import zstandard

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection


@dataclass(frozen=True)
class Input:
    """One file to read."""

    path: str
    label: str
    """Its name in messages and in the prepared folder; the same on every machine for built-in corpora."""
    format: str
    """A key of READERS."""
    size: int

    @property
    def packed(self) -> bool:
        """Whether the file is compressed."""
        return self.format == "parquet" or self.path.endswith(tuple(OPENERS))


@dataclass
class Skips:
    """What was left out of a source: a count for each reason, and the first places."""

    counts: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)
    bad: int = 0
    """Those that `bad_lines: error` would have refused."""

    MOST_PLACES = 20

    def add(self, reason: str, place: str, bad: bool = False) -> None:
        """Count something left out."""
        self.counts[reason] += 1
        self.bad += bad
        if len(self.places) < self.MOST_PLACES:
            self.places.append(f"{place}: {reason}")


def format_of(path: str) -> str:
    """Choose the reader of a file by its name, without the suffix of a compression."""
    name = path.lower()
    for suffix in OPENERS:
        name = name.removesuffix(suffix)
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), "text")


def read_documents(item: Input, section: SourceSection, skips: Skips) -> Iterator[str]:
    """Read the documents of one file, in order; what is left out is added to `skips`. Raises DataError."""
    for place, text in READERS[item.format](item, section, skips).documents():
        if text == "":
            skips.add("empty document", place)
        else:
            yield text


class Reader:
    """Reads one file; a subclass a format."""

    def __init__(self, item: Input, section: SourceSection, skips: Skips) -> None:
        self.item = item
        self.key = section.text_key
        self.skip = section.bad_lines == "skip"
        self.skips = skips

    def documents(self) -> Iterator[tuple[str, str]]:
        """Read the documents as (place, text)."""
        raise NotImplementedError

    def lines(self) -> Iterator[bytes]:
        """Read and decompress lines, cut at newlines only."""
        number = 0
        try:
            with _open(self.item.path) as file:
                for line in file:
                    number += 1
                    yield line
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            self.bad(f"damaged or cut compressed file ({error})", f"{self.item.label}, after line {number}")
        except OSError as error:
            raise DataError(f"{self.item.label}: {error.strerror or error}") from None

    def is_text(self, value: Any, place: str) -> bool:
        """Tell whether `value`, found under the key, is text; what is not is bad."""
        if not isinstance(value, str):
            self.bad(f"{self.key!r} holds {_kind(value)}, not text", place)
            return False
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self.bad("a lone surrogate", f"{place}, character {error.start} of the text")
            return False
        return True

    def bad(self, reason: str, place: str, more: str = "") -> None:
        """Refuse what stands at `place` (DataError), or count it."""
        if not self.skip:
            raise DataError(f"{place}: {reason}{more}; fix it, or leave such out with bad_lines: skip")
        self.skips.add(reason, place, bad=True)


class TextReader(Reader):
    """The whole file as one document."""

    def documents(self) -> Iterator[tuple[str, str]]:
        data = b"".join(self.lines())
        try:
            yield self.item.label, data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.bad(f"invalid UTF-8 ({error.reason})", f"{self.item.label}, byte {error.start}")


class JsonlReader(Reader):
    """The text of the object on each line."""

    def documents(self) -> Iterator[tuple[str, str]]:
        number = 0
        for number, line in enumerate(self.lines(), 1):
            place = f"{self.item.label}, line {number}"
            found = self._object(line, place, "utf-8-sig" if number == 1 else "utf-8")
            if found is not None and self.is_text(found[self.key], place):
                yield place, found[self.key]
        if number == 0:
            self.skips.add("empty file", self.item.label)

    def _object(self, line: bytes, place: str, encoding: str) -> dict[str, Any] | None:
        """Parse the line's object, which has the key; None when there is none, which is bad."""
        if not line.strip():
            self.bad("blank line", place)
            return None
        try:
            value = json.loads(line.rstrip(b"\r\n").decode(encoding))
        except UnicodeDecodeError as error:
            self.bad(f"invalid UTF-8 ({error.reason})", f"{place}, byte {error.start} of the line")
        except json.JSONDecodeError as error:
            several = error.msg == "Extra data"
            reason = "more than one object on a line" if several else f"no JSON ({error.msg})"
            self.bad(reason, f"{place}, column {error.colno}")
        except (ValueError, RecursionError) as error:
            self.bad(f"no JSON ({type(error).__name__})", place)
        else:
            if not isinstance(value, dict):
                self.bad(f"{_kind(value)}, not an object", place)
            elif self.key in value:
                return value
            else:
                keys = ", ".join(map(repr, list(value)[:8])) or "none"
                self.bad(f"no key {self.key!r}", place, f" (text_key); the object's keys: {keys}")
        return None


class ParquetReader(Reader):
    """The text in each row of a column."""

    def documents(self) -> Iterator[tuple[str, str]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise DataError(
                f'{self.item.label}: parquet needs the package pyarrow: pip install "kvm-hybrid[parquet]"'
            ) from None
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(self.item.path) as file:
                if self.key not in file.schema_arrow.names:
                    names = ", ".join(file.schema_arrow.names)
                    raise DataError(
                        f"{self.item.label} has no column {self.key!r} (text_key); it has: {names}"
                    )
                for batch in file.iter_batches(columns=[self.key], batch_size=256):
                    for value in batch.column(0).to_pylist():
                        number += 1
                        place = f"{self.item.label}, row {number}"
                        if self.is_text(value, place):
                            yield place, value
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            self.bad(f"damaged parquet file ({error})", f"{self.item.label}, after row {number}")


class VersesReader(Reader):
    """The Bible's books, a verse a line."""

    def documents(self) -> Iterator[tuple[str, str]]:
        books: dict[str, list[str]] = {}
        for line in self.lines():
            verse = json.loads(line)
            books.setdefault(verse["book"], []).append(verse["text"])
        for book, verses in books.items():
            yield f"{self.item.label}, {book}", "\n".join(verses) + "\n"


class BookReader(VersesReader):
    """The Bible as one document."""

    def documents(self) -> Iterator[tuple[str, str]]:
        yield self.item.label, "".join(text for _, text in super().documents())


READERS: dict[str, type[Reader]] = {
    "text": TextReader,
    "jsonl": JsonlReader,
    "parquet": ParquetReader,
    "verses": VersesReader,
    "book": BookReader,
}

SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
"""Ending of a file's name -> format; any other is text."""


class _ZstdFile(io.RawIOBase):
    """The content of a .zst file; unlike zstandard's own reader it raises EOFError when the file is cut."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 (closed with this object)
        self._frames = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._left = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._left or self._file.read(1 << 17)
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self._frame = self._frame or self._frames.decompressobj()
            self._ready, self._left = self._frame.decompress(packed), b""
            if self._frame.eof:  # another frame may follow
                self._left, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


OPENERS: dict[str, Callable[[str], IO[bytes]]] = {
    ".gz": lambda path: cast(IO[bytes], gzip.GzipFile(path)),
    ".zst": lambda path: io.BufferedReader(_ZstdFile(path)),
}
"""Ending of a compressed file's name -> how it is opened."""


def _open(path: str) -> IO[bytes]:
    for suffix, opener in OPENERS.items():
        if path.endswith(suffix):
            return opener(path)
    return open(path, "rb")


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        bytes: "bytes",
        type(None): "null",
    }
    return names.get(type(value), f"a {type(value).__name__}")
