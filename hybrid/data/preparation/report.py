"""What a preparation found and made."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.errors import DataError
from hybrid.files import damaged, read_json
from hybrid.text import columns

from .inputs import Skips
from .shards import HASH, IDS, Unit, fingerprint_of, held_out, read_sidecar

MOST_SHOWN = 3
"""Places of what was left out that are printed for a source."""


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
    fingerprint: str = ""
    """Of all its documents in order (`shards.fingerprint_of`)."""
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
    tokenizer_notes: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Shards other parts have still to make; the folder is prepared when there are none."""
    built: int = 0
    kept: int = 0

    def to_json(self) -> dict[str, Any]:
        """List what report.json holds: nothing that depends on how often the preparation was interrupted."""
        return {key: value for key, value in asdict(self).items() if key not in ("missing", "built", "kept")}

    def __str__(self) -> str:
        rows = [["source", "documents", "held out", "MB", "tokens", "bytes/token", "skipped"]]
        for name, source in self.sources.items():
            megabytes, ratio = source.bytes / 1e6, source.bytes / max(1, source.tokens)
            counts = [f"{source.documents:,}", f"{source.held_out:,}", f"{megabytes:.2f}"]
            skipped = sum(source.skipped.values())
            rows.append([name, *counts, f"{source.tokens:,}", f"{ratio:.2f}", f"{skipped:,}"])
        lines = [columns(rows, left={0})]
        for name, source in self.sources.items():
            lines += [f"{name}: skipped {count:,}: {reason}" for reason, count in source.skipped.items()]
            lines += [f"  {place}" for place in source.skipped_places[:MOST_SHOWN]]
            if sum(source.skipped.values()) > MOST_SHOWN:
                lines.append(f"  ... ({len(source.skipped_places)} places in report.json)")
        lines += _scripts_in_bytes(self.tokenizer_notes.get("scripts", {}))
        lines.append(f"{self.built} shards built, {self.kept} kept, {len(self.missing)} left to other parts")
        return "\n".join(lines)


def _scripts_in_bytes(scripts: dict[str, dict[str, int]]) -> list[str]:
    """Say which scripts of the tokenizer's sample have characters without an id, where it is 1 % or more."""
    total = sum(script["characters"] for script in scripts.values())
    return [
        f"tokenizer: {script['in_bytes'] / script['characters']:.1%} of the characters of {name} have no id "
        f"and go to bytes ({script['kinds']:,} kinds; a larger data.vocab_size takes more of them in)"
        for name, script in scripts.items()
        if script["in_bytes"] >= script["characters"] / 100 and script["characters"] >= total / 100
    ]


def read_report(path: Path) -> dict[str, Any]:
    """Read a folder's report.json. Raises DataError when it is absent or damaged."""
    if not path.is_file():
        raise DataError(f"{path.parent} holds no finished preparation; run `hybrid prepare` first")
    report = read_json(path, {"tokenizer": str, "vocab_size": int, "settings": dict, "sources": dict})
    for name, entry in report["sources"].items():
        shards = entry.get("shards") if isinstance(entry, dict) else None
        if not shards or not isinstance(shards, list):
            raise damaged(path, f"source {name!r} lists no shards")
    return report


def report_source(folder: Path, units: list[Unit], validation: float, skips: Skips) -> SourceReport:
    """Sum up a source's finished shards; `validation` is the share of its documents to be held out, `skips`
    what was left out before files were read. Raises DataError when all its shards hold no document."""
    report = SourceReport(skipped=dict(skips.counts), skipped_places=list(skips.places))
    indices = []
    for unit in units:
        path = unit.sidecar(folder)
        if not path.is_file():
            continue
        info = read_sidecar(path)
        report.shards.append(unit.name)
        report.documents += info["documents"]
        report.bytes += info["bytes"]
        report.tokens += info["tokens"]
        report.skipped = dict(sorted((Counter(report.skipped) + Counter(info["skipped"])).items()))
        report.skipped_places = (report.skipped_places + info["skipped_places"])[: Skips.MOST_PLACES]
        indices.append(np.load(path.with_suffix(".index.npy"), allow_pickle=False))
    if len(report.shards) == len(units):
        index = np.concatenate(indices)
        report.fingerprint = fingerprint_of(index)
        if not len(index):
            reasons = ", ".join(f"{count} x {reason}" for reason, count in report.skipped.items())
            raise DataError(f"source {units[0].source} holds no document ({reasons or 'no line at all'})")
        mask = held_out(index[:, HASH], validation)
        report.held_out, report.held_out_tokens = int(mask.sum()), int(index[mask, IDS].sum())
    return report
