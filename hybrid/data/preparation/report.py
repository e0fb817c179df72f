"""What a preparation found and made."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid.files import damaged, read_json


@dataclass
class SourceReport:
    """What preparation found in one source."""

    documents: int = 0
    held_out: int = 0
    """Documents for validation (part of `documents`)."""
    bytes: int = 0
    tokens: int = 0
    """Stored ids: text, begin and end ids."""
    held_out_tokens: int = 0
    shards: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> lines, rows or documents left out."""
    skipped_places: list[str] = field(default_factory=list)
    """The first of them: file, place, reason."""


@dataclass
class Report:
    """Kept as `report.json`, which marks the folder as fully prepared."""

    tokenizer: str
    """Fingerprint (SHA-256) of tokenizer.model."""
    vocab_size: int
    settings: dict[str, Any]
    sources: dict[str, SourceReport] = field(default_factory=dict)
    tokenizer_notes: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Shards other parts have still to make; the folder is prepared when there are none."""
    built: int = 0
    kept: int = 0

    def to_json(self) -> dict[str, Any]:
        """What report.json holds: nothing that depends on how often the preparation was interrupted."""
        content = asdict(self)
        for key in ("missing", "built", "kept"):
            del content[key]
        return content

    def __str__(self) -> str:
        names = ("documents", "held out", "MB", "tokens", "bytes/token", "skipped")
        widths = (10, 10, 9, 13, 13, 9)
        lines = ["source".ljust(12) + "".join(n.rjust(w) for n, w in zip(names, widths, strict=True))]
        for name, source in self.sources.items():
            ratio = source.bytes / max(1, source.tokens)
            lines.append(
                f"{name:<12}{source.documents:>10,}{source.held_out:>10,}{source.bytes / 1e6:>9.2f}"
                f"{source.tokens:>13,}{ratio:>13.2f}{sum(source.skipped.values()):>9,}"
            )
        for name, source in self.sources.items():
            lines += [f"{name}: skipped {count:,}: {reason}" for reason, count in source.skipped.items()]
        lines.append(f"{self.built} shards built, {self.kept} kept, {len(self.missing)} left to other parts")
        return "\n".join(lines)


def read_report(path: Path) -> dict[str, Any]:
    """A folder's report.json. Raises DataError when it is damaged."""
    report = read_json(path, {"tokenizer": str, "vocab_size": int, "settings": dict, "sources": dict})
    for name, entry in report["sources"].items():
        shards = entry.get("shards") if isinstance(entry, dict) else None
        if not shards or not isinstance(shards, list):
            raise damaged(path, f"source {name!r} lists no shards")
    return report


def add_shard(report: SourceReport, name: str, info: dict[str, Any]) -> None:
    """Add a finished shard's sidecar."""
    report.shards.append(name)
    report.documents += info["documents"]
    report.bytes += info["bytes"]
    report.tokens += info["tokens"]
    report.skipped = dict(sorted((Counter(report.skipped) + Counter(info["skipped"])).items()))
    report.skipped_places = (report.skipped_places + info["skipped_places"])[:20]
