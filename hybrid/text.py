"""Text for people: tables and durations."""

from __future__ import annotations

from collections.abc import Sequence, Set


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
