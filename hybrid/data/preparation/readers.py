"""Reading documents from files of text and JSON; `READERS` has all formats.

Text is UTF-8; a text file is one document, a JSONL line, an item of a JSON list or a table's row is one. What
cannot be read (invalid UTF-8, a line that is no object, a missing key, a lone surrogate, a cut compressed
file) is an error naming the file and the byte, line or row; with `bad_lines: skip` it is left out and
counted. Empty documents are always left out and counted. `docs/data.md` states the rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hybrid.recipe.schema import SourceSection

from .formats import contradiction
from .inputs import MISSING, Input, Reader, Skips, lookup
from .tables import ArrowReader, CsvReader, ParquetReader, TsvReader


def read_documents(item: Input, section: SourceSection, skips: Skips) -> Iterator[str]:
    """Read the documents of one file, in order; what is left out is added to `skips`. Raises DataError."""
    reader = READERS[item.format](item, section, skips)
    try:
        with open(item.path, "rb") as file:
            found = contradiction(item.path, file.read(64), item.format)
    except OSError as error:
        found = f"cannot be opened ({error.strerror})"
    if found is not None:
        reader.bad(found, item.label)
        return
    for place, text in reader.documents():
        if text == "":
            skips.add("empty document", place)
        else:
            yield text


class TextReader(Reader):
    """The whole file as one document."""

    def documents(self) -> Iterator[tuple[str, str]]:
        bad = self.skips.bad
        data = b"".join(self.lines())
        if self.skips.bad > bad:  # damaged: what there is of it is no document
            return
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.bad(f"invalid UTF-8 ({error.reason})", f"{self.item.label}, byte {error.start}")
            return
        if (found := self._not_text(text)) is not None:
            number, words, more = found
            self.bad(words, f"{self.item.label}, line {number}", more)
        else:
            yield self.item.label, text

    def _not_text(self, text: str) -> tuple[int, str, str] | None:
        """Say in which line and how the content is no text: NULs side by side or many, as binary files and
        UTF-16 have them; or JSON with the key, in a file that is text by its name only."""
        if "\0\0" in text or text.count("\0") > 1 + len(text) // 1000:
            return text.count("\n", 0, text.index("\0")) + 1, "NULs, as in a binary or UTF-16 file", ""
        at = _skip_space(text, 0)
        at = _skip_space(text, at + text.startswith("[", at))
        if self.item.by_name and text.startswith("{", at):
            try:
                value, _ = DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            if lookup(value, self.key) is not MISSING:
                words = f"a JSON object with the key {self.key!r} in a file whose name says text"
                more = " (set format: json, or format: text to take it as it is)"
                return text.count("\n", 0, at) + 1, words, more
        return None


class JsonlReader(Reader):
    """The text of the object on each line."""

    def documents(self) -> Iterator[tuple[str, str]]:
        number = 0
        for number, line in enumerate(self.lines(), 1):
            place = f"{self.item.label}, line {number}"
            value = self._parse(line, place)
            if value is not MISSING and (text := self.text_of(value, place)) is not None:
                yield place, text
        if number == 0:
            self.skips.add("empty file", self.item.label)

    def _parse(self, line: bytes, place: str) -> Any:
        """Parse the line's value; MISSING when there is none, which is bad."""
        if not line.strip():
            self.bad("blank line", place)
            return MISSING
        try:
            return DECODER.decode(line.rstrip(b"\r\n").decode("utf-8"))
        except UnicodeDecodeError as error:
            self.bad(f"invalid UTF-8 ({error.reason})", f"{place}, byte {error.start} of the line")
        except json.JSONDecodeError as error:
            several = error.msg == "Extra data"
            reason = "more than one object on a line" if several else f"no JSON ({error.msg})"
            self.bad(reason, f"{place}, column {error.colno}")
        except DoubledKeyError as error:
            self.bad(str(error), place)
        except (ValueError, RecursionError) as error:
            self.bad(f"no JSON ({type(error).__name__})", place)
        return MISSING


class JsonReader(JsonlReader):
    """The text of each object in a list, or of objects one after the other: mostly one a line, as in C4."""

    def documents(self) -> Iterator[tuple[str, str]]:
        lines = self.lines()
        first = next(lines, b"").strip()
        lines.close()  # type: ignore[attr-defined]
        if not first or (first.startswith(b"{") and first.endswith(b"}")):
            yield from super().documents()
            return
        try:
            text = b"".join(self.lines()).decode("utf-8")
        except UnicodeDecodeError as error:
            self.bad(f"invalid UTF-8 ({error.reason})", f"{self.item.label}, byte {error.start}")
            return
        for place, value in self._values(text):
            if (found := self.text_of(value, place)) is not None:
                yield place, found

    def _values(self, text: str) -> Iterator[tuple[str, Any]]:
        """Parse a list's items, or values in a row. What follows a mistake is lost, as nothing says where the
        next item begins."""
        at, line, counted = _skip_space(text, 0), 1, 0
        is_list = text.startswith("[", at)
        at = _skip_space(text, at + is_list)
        while at < len(text) and not (is_list and text[at] == "]"):
            line, counted = line + text.count("\n", counted, at), at
            place = f"{self.item.label}, line {line}"
            try:
                value, at = DECODER.raw_decode(text, at)
            except DoubledKeyError as error:
                self.bad(f"{error}; the rest of the file is left out", place)
                return
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
                where = getattr(error, "lineno", line)
                self.bad(f"no JSON ({reason}); the rest is left out", f"{self.item.label}, line {where}")
                return
            yield place, value
            at = _skip_space(text, at)
            if is_list and text.startswith(",", at):
                at = _skip_space(text, at + 1)
            elif is_list and not text.startswith("]", at):
                self.bad("a list that does not end, or lacks a comma; the rest is left out", place)
                return
        if is_list and (at >= len(text) or _skip_space(text, at + 1) < len(text)):
            self.bad("a list that does not end, or text after its end", self.item.label)


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
    "json": JsonReader,
    "csv": CsvReader,
    "tsv": TsvReader,
    "parquet": ParquetReader,
    "arrow": ArrowReader,
    "verses": VersesReader,
    "book": BookReader,
}


class DoubledKeyError(ValueError):
    """A key that an object has twice, so that one of its values would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise DoubledKeyError(f"the key {next(n for n in names if names.count(n) > 1)!r} twice in an object")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
