"""What a benchmark found, as a table for people and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import UserError


class BenchError(UserError):
    """A benchmark that does not exist or cannot run here."""


@dataclass(frozen=True)
class Row:
    """One number to reach."""

    work: str
    against: str
    measured: float
    target: float
    at_least: bool = True
    ideal: float | None = None
    """What counted FLOPs promise, where they promise anything."""
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def cells(self) -> list[str]:
        bound = "at least" if self.at_least else "at most"
        ideal = "-" if self.ideal is None else f"{self.ideal:.3g}{self.unit}"
        return [
            self.work,
            self.against,
            f"{self.measured:.3g}{self.unit}",
            ideal,
            f"{bound} {self.target:g}{self.unit}",
            "met" if self.met else "MISSED",
        ]


def rows_table(rows: Sequence[Row]) -> str:
    heading = ["work", "against", "measured", "ideal", "target", ""]
    return columns([heading, *(row.cells() for row in rows)], left={0, 1, 5})


def columns(rows: Sequence[Sequence[str]], left: set[int]) -> str:
    """Aligned text; columns in `left` start at the left, others end at the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def shares_table(title: str, seconds: dict[str, float]) -> str:
    """Where time went, the largest part first."""
    total = sum(seconds.values())
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    rows = [[f"  {name}", duration(value), f"{value / total:.0%}"] for name, value in ordered]
    return f"{title}: {duration(total)}\n" + columns(rows, left={0})


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def environment(device: str = "cpu") -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def as_json(value: Any) -> Any:
    """Rows as plain tables, with their verdict."""
    if isinstance(value, Row):
        return {**asdict(value), "met": value.met}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return value


def keep(path: Path, results: dict[str, Any]) -> None:
    """Write JSON, adding to what the file holds under other names; the file is whole at any time."""
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    held.update(as_json(results))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
