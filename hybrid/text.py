"""Text from people and for people: files read, tables and durations."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode(data: bytes) -> str:
    """Decode UTF-8 without the byte mark (BOM) it may begin with; a ValueError says what it is instead."""
    # text of UTF-16 or UTF-32 without a mark begins with a character of one byte beside zeros
    if data.startswith((*_UTF16, codecs.BOM_UTF32_BE)) or (len(data) > 1 and data[:2].count(0) == 1):
        raise ValueError("is not UTF-8 text but UTF-16 or UTF-32: save it as UTF-8")
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        start = error.start + len(codecs.BOM_UTF8) * data.startswith(codecs.BOM_UTF8)
        raise ValueError(f"is not UTF-8 text: {error.reason} at byte {start}") from None


def columns(rows: Sequence[Sequence[str]], left: Set[int] = frozenset(), indent: str = "") -> str:
    """Align cells in columns; those numbered in `left` are flush left, the others flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Write seconds with two or three digits, as s, ms or us."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def clock(seconds: float) -> str:
    """Write seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
