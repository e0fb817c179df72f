"""Text to token shards: `prepare`.

The prepared folder:
    tokenizer.model   the sentencepiece model;  tokenizer.json  what it was made from
    SOURCE/NAME.*     token shards, see `shards`
    report.json       what was found and made; there when every shard is
Every file is written under a temporary name and renamed, so a preparation that was stopped at any moment goes
on from its finished shards, and ends with the same bytes as one that was not.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.errors import DataError
from hybrid.files import read_json, write_json
from hybrid.recipe.schema import DataSection, SourceSection

from .pool import Pool, plain_section
from .report import Report, SourceReport, add_shard, read_report
from .shards import (
    HASH,
    IDS,
    Unit,
    build,
    difference,
    group,
    held_out,
    other_files,
    read_sidecar,
    sidecar,
)
from .sources import Input, list_inputs
from .tokenizer import Tokenizer, TrainingNotes
from .tokenizer_sample import training_sample

WORTH_PROCESSES = 1 << 18
"""Bytes of files below which starting processes takes longer than the work."""


TOKENIZER_FACTS = {"fingerprint": str, "vocab_size": int, "notes": dict, "made_from": dict}


def prepare(
    data: DataSection,
    *,
    part: tuple[int, int] = (1, 1),
    processes: int | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Make the tokenizer and the token shards that `data` describes, keeping what is finished already.

    `part` (i, n): make only the i-th of n parts, for machines that share the folder; the last one to end
    writes the report. `force`: make again what no longer fits its sources or settings, which is refused
    otherwise. `say` gets lines about what is being done. Raises DataError.
    """
    if not 1 <= part[0] <= part[1]:
        raise DataError(f"part {part[0]}/{part[1]}: must be i/n with 1 <= i <= n")
    folder = Path(data.folder)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"data.folder is {folder}, which is a file; it must be a folder, or not there yet")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".lock-{part[0]}-of-{part[1]}"):
        plan = _Plan(data, part)
        found = plan.differences()
        if found and not force:
            more = "" if len(found) <= 5 else f"\n  and {len(found) - 5} more"
            raise DataError(
                f"{folder} was prepared from other sources or settings:\n  "
                + "\n  ".join(found[:5])
                + more
                + "\nprepare again with --force to rebuild it, or choose another data.folder"
            )
        (folder / "report.json").unlink(missing_ok=True)
        plan.remove_stale()
        tokenizer = plan.make_tokenizer(bool(found), say)
        todo = [unit for unit in plan.own if not plan.finished(unit, tokenizer)]
        count = processes or data.prepare_processes or len(os.sched_getaffinity(0))
        size = sum(unit.size for unit in todo)
        if todo:
            say(f"{len(todo)} of {len(plan.own)} shards to make, from {size / 1e6:.1f} MB of files")
        if count == 1 or len(todo) <= 1 or size < WORTH_PROCESSES:
            for unit in todo:
                build(folder, unit, plan.sections[unit.source], tokenizer)
        else:
            Pool(folder, plan.sections, todo, say).run(min(count, len(todo)))
        return plan.report(tokenizer, built=len(todo))


def is_prepared(data: DataSection) -> bool:
    """Whether the folder holds a finished preparation with these settings. The source files themselves are
    not looked at (they may be on another machine); `prepare` does."""
    folder = Path(data.folder)
    path = folder / "report.json"
    if not path.is_file():
        return False
    report = read_report(path)
    return report["settings"] == _settings(data) and all(
        sidecar(folder, source, name).is_file()
        for source, entry in report["sources"].items()
        for name in entry["shards"]
    )


def outdated(data: DataSection) -> str | None:
    """What has happened to the sources of a finished preparation since, by names and sizes of files alone;
    None also where they cannot be looked at, as they may be on another machine."""
    try:
        plan = _Plan(data, (1, 1))
        for unit in plan.units:
            path = sidecar(plan.folder, unit.source, unit.name)
            if not path.is_file():
                return f"{unit.inputs[0].label} is new"
            if (found := other_files(path, read_sidecar(path), unit)) is not None:
                return found
    except DataError:
        return None
    return next((f"{path} belongs to no source any more" for path in plan._stale()), None)


def _settings(data: DataSection) -> dict[str, Any]:
    """What a preparation depends on, as the recipe says it."""
    sources = {}
    for name, section in data.sources.items():
        wanted = {key: getattr(section, key) for key in ("format", "text_key", "validation", "bad_lines")}
        sources[name] = {"paths": list(section.paths), **wanted}
    made = (
        {"tokenizer": data.tokenizer}
        if data.tokenizer is not None
        else {"vocab_size": data.vocab_size, "tokenizer_sample_bytes": data.tokenizer_sample_bytes}
    )
    return {**made, "sources": sources}


class _Plan:
    """What there is to do: sources, their units, and this part's share of them."""

    def __init__(self, data: DataSection, part: tuple[int, int]) -> None:
        if not data.sources:
            raise DataError("data.sources is empty; name at least one source with its paths")
        self.data = data
        self.folder = Path(data.folder)
        self.sections: dict[str, SourceSection] = {}
        self.inputs: dict[str, list[Input]] = {}
        for name, section in data.sources.items():
            if not name or name.startswith(".") or not all(c.isalnum() or c in "-_." for c in name):
                raise DataError(f"source name {name!r}: use letters, digits, '-', '_' and '.'")
            self.sections[name] = SourceSection(**plain_section(section))
            self.inputs[name] = list_inputs(name, section)
            self._refuse_own_files(name)
        self.units = [unit for name, inputs in self.inputs.items() for unit in group(name, inputs)]
        self.own = self.units[part[0] - 1 :: part[1]]

    def differences(self) -> list[str]:
        """In words, everything in the folder that no longer fits the sources and settings."""
        found = []
        made = self.folder / "tokenizer.json"
        if made.is_file():
            try:
                was = read_json(made, TOKENIZER_FACTS)["made_from"]
                Tokenizer.load(self.folder / "tokenizer.model")
            except DataError as error:
                return [str(error)]
            now = self._tokenizer_source()
            found += [
                f"tokenizer: {key} was {was.get(key)!r}, is now {now.get(key)!r}"
                for key in sorted(was.keys() | now.keys())
                if was.get(key) != now.get(key)
            ]
        if found or not made.is_file():
            return found
        tokenizer = Tokenizer.load(self.folder / "tokenizer.model")
        for unit in self.own:
            if sidecar(self.folder, unit.source, unit.name).is_file():
                why = difference(self.folder, unit, self.sections[unit.source], tokenizer)
                found += [why] if why else []
        return found + [f"{path} belongs to no source any more" for path in self._stale()]

    def finished(self, unit: Unit, tokenizer: Tokenizer) -> bool:
        return (
            sidecar(self.folder, unit.source, unit.name).is_file()
            and difference(self.folder, unit, self.sections[unit.source], tokenizer) is None
        )

    def remove_stale(self) -> None:
        for path in self._stale():
            for suffix in (".json", ".index.npy", ".tokens"):
                path.with_name(path.name.removesuffix(".json") + suffix).unlink(missing_ok=True)

    def make_tokenizer(self, again: bool, say: Callable[[str], None]) -> Tokenizer:
        """The folder's tokenizer; trained or copied when it is not there, or `again`."""
        path, made = self.folder / "tokenizer.model", self.folder / "tokenizer.json"
        if made.is_file() and not again:
            return Tokenizer.load(path)
        notes = TrainingNotes()
        if self.data.tokenizer is not None:
            tokenizer = Tokenizer.load(self.data.tokenizer)
            tokenizer.save(path)
        else:
            sources = {name: (section, self.inputs[name]) for name, section in self.sections.items()}
            sample = training_sample(sources, self.data.tokenizer_sample_bytes)
            millions = sum(map(len, sample)) / 1e6
            say(f"training a tokenizer of {self.data.vocab_size} ids on {millions:.1f} million characters")
            tokenizer = Tokenizer.train(sample, self.data.vocab_size, path, notes)
        content = {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "notes": asdict(notes),
            "made_from": self._tokenizer_source(),
        }
        write_json(made, content)
        return tokenizer

    def report(self, tokenizer: Tokenizer, built: int) -> Report:
        """The report so far; written to report.json when no shard is missing."""
        notes = read_json(self.folder / "tokenizer.json", TOKENIZER_FACTS)["notes"]
        report = Report(
            tokenizer.fingerprint, tokenizer.vocab_size, _settings(self.data), tokenizer_notes=notes
        )
        report.built, report.kept = built, len(self.own) - built
        for name, section in self.sections.items():
            entry = report.sources[name] = SourceReport()
            indices = []
            for unit in self.units:
                path = sidecar(self.folder, name, unit.name)
                if unit.source != name:
                    continue
                if not path.is_file():
                    report.missing.append(f"{name}/{unit.name}")
                    continue
                add_shard(entry, unit.name, read_sidecar(path))
                indices.append(np.load(path.with_name(unit.name + ".index.npy"), allow_pickle=False))
            if not report.missing:
                index = np.concatenate(indices)
                if not len(index):
                    raise DataError(f"source {name} holds no document ({_reasons(entry.skipped)})")
                mask = held_out(index[:, HASH], section.validation)
                entry.held_out, entry.held_out_tokens = int(mask.sum()), int(index[mask, IDS].sum())
        if not report.missing:
            for left in self.folder.rglob("*.partial"):  # of interrupted preparations
                left.unlink()
            write_json(self.folder / "report.json", report.to_json())
        return report

    def _refuse_own_files(self, name: str) -> None:
        own = self.folder.resolve()
        for item in self.inputs[name]:
            if Path(item.path).resolve().is_relative_to(own):
                raise DataError(f"source {name} reads {item.label} inside data.folder {self.folder} itself")

    def _tokenizer_source(self) -> dict[str, Any]:
        """What the tokenizer is made from."""
        if self.data.tokenizer is not None:
            return {"given": Tokenizer.load(self.data.tokenizer).fingerprint}
        return {
            "vocab_size": self.data.vocab_size,
            "sample_bytes": self.data.tokenizer_sample_bytes,
            "text_key": {name: section.text_key for name, section in self.sections.items()},
            "validation": {name: section.validation for name, section in self.sections.items()},
            "files": {name: _listing(inputs) for name, inputs in self.inputs.items()},
        }

    def _stale(self) -> list[Path]:
        """Sidecars of shards that no source has any more."""
        known = {sidecar(self.folder, unit.source, unit.name) for unit in self.units}
        return sorted(path for path in self.folder.glob("*/*.json") if path not in known)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One preparation of a part at a time; a second waits, and then finds the work done."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _listing(inputs: list[Input]) -> str:
    """Digest of the files' names, formats and sizes."""
    text = json.dumps([(item.label, item.format, item.size) for item in inputs])
    return f"{len(inputs)} files, {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _reasons(skipped: dict[str, int]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "no line at all"
