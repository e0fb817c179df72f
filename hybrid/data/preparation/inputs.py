"""Files to read, what is left out of them, and what all readers share."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .unpack import Damaged, compression_of, open_unpacked


@dataclass(frozen=True)
class Input:
    """One file to read."""

    path: str
    label: str
    """Its name in messages and in the prepared folder; the same on every machine for built-in corpora."""
    format: str
    """A key of READERS."""
    size: int
    by_name: bool = False
    """Whether the format was chosen by the file's name, and its content may contradict it."""

    @property
    def packed(self) -> bool:
        """Whether the file is compressed."""
        return self.format == "parquet" or compression_of(self.path) is not None


@dataclass
class Skips:
    """What was left out of a source: a count for each reason, and the first places."""

    counts: Counter[str] = field(default_factory=Counter)
    places: list[str] = field(default_factory=list)
    bad: int = 0
    """Those that `bad_lines: error` would have refused."""

    MOST_PLACES: ClassVar[int] = 20

    def add(self, reason: str, place: str, count: int = 1, bad: bool = False) -> None:
        """Count something left out."""
        self.counts[reason] += count
        self.bad += count * bad
        if len(self.places) < self.MOST_PLACES:
            self.places.append(f"{place}: {reason}")

    def refuse(self, section: SourceSection, reason: str, place: str, more: str = "", count: int = 1) -> None:
        """Refuse what stands at `place` (DataError), or count it where the source's bad_lines is skip."""
        if section.bad_lines != "skip":
            raise DataError(f"{place}: {reason}{more}; fix it, or leave such out with bad_lines: skip")
        self.add(reason, place, count, bad=True)


class Reader:
    """Reads one file; a subclass a format."""

    def __init__(self, item: Input, section: SourceSection, skips: Skips) -> None:
        self.item = item
        self.key = section.text_key
        self.section = section
        self.skips = skips

    def documents(self) -> Iterator[tuple[str, str]]:
        """Read the documents as (place, text)."""
        raise NotImplementedError

    def lines(self) -> Iterator[bytes]:
        """Read and unpack lines, cut at newlines only, without a byte order mark before the first. A damaged
        file is bad, and ends after what could be unpacked."""
        number = 0
        try:
            with open_unpacked(self.item.path) as file:
                for line in file:
                    number += 1
                    yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        except Damaged as error:
            place = f"{self.item.label}, after line {number}"
            self.bad("damaged or cut compressed file", place, f" ({error})")
        except OSError as error:
            raise DataError(f"{self.item.label}: {error.strerror or error}") from None

    def text_of(self, value: Any, place: str) -> str | None:
        """Find the text under the key in a document's object; None when it is none, which is bad."""
        if not isinstance(value, dict):
            self.bad(f"{kind_of(value)}, not an object", place)
            return None
        text = lookup(value, self.key)
        if text is MISSING:
            keys = ", ".join(map(repr, list(value)[:8])) or "none"
            self.bad(f"no key {self.key!r}", place, f" (text_key); the object's keys: {keys}")
            return None
        if not isinstance(text, str):
            self.bad(f"{self.key!r} holds {kind_of(text)}, not text", place)
            return None
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            self.bad("a lone surrogate", f"{place}, character {error.start} of the text")
            return None
        return text

    def bad(self, reason: str, place: str, more: str = "", count: int = 1) -> None:
        """Refuse what stands at `place` (DataError), or count it."""
        self.skips.refuse(self.section, reason, place, more, count)


MISSING = object()


def lookup(value: dict[str, Any], key: str) -> Any:
    """Find the value of `key`, or of a nested one by its path ("meta.text"); MISSING when there is none."""
    if key in value:
        return value[key]
    for at in (at for at, character in enumerate(key) if character == "."):
        inner = value.get(key[:at])
        if isinstance(inner, dict) and (found := lookup(inner, key[at + 1 :])) is not MISSING:
            return found
    return MISSING


def kind_of(value: Any) -> str:
    """Name a value's type in JSON's words."""
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
