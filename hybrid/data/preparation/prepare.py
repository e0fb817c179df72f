"""Text to token shards: `prepare`.

The prepared folder:
    tokenizer.model   the sentencepiece model;  tokenizer.json  what it was made from
    SOURCE/NAME.*     token shards, see `shards`
    report.json       what was found and made; there when every shard is
Every file is written under a temporary name and renamed, so a preparation that was stopped at any moment goes
on from its finished shards, and ends with the same bytes as one that was not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid.data.tokenizer import Tokenizer
from hybrid.errors import DataError
from hybrid.files import PARTIAL, lock, read_json, write_json
from hybrid.recipe.schema import DataSection

from .inputs import Input, Skips
from .processes import build_in_processes
from .report import Report, read_report, report_source
from .shards import Unit, build, difference, make_units, other_files, read_sidecar, sidecar
from .sources import list_inputs
from .tokenizer_training import TrainingNotes, train_tokenizer, training_sample

WORTH_PROCESSES = 1 << 18
"""Bytes of files below which starting processes takes longer than the work."""

TOKENIZER_FACTS = {"fingerprint": str, "vocab_size": int, "notes": dict, "made_from": dict}
MOST_SHOWN = 5
"""Changes listed in a refusal."""

Say = Callable[[str], None]


def prepare(
    data: DataSection,
    *,
    part: tuple[int, int] = (1, 1),
    processes: int | None = None,
    force: bool = False,
    say: Say = lambda line: None,
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
    with _locked(folder / f".lock-{part[0]}-of-{part[1]}", say):
        plan = _Plan(data, part, contents=force)
        changes = plan.changes()
        if changes and not force:
            raise DataError(_refusal(folder, changes))
        (folder / "report.json").unlink(missing_ok=True)
        plan.remove_stale()
        tokenizer = plan.tokenizer(bool(changes), say)
        built = plan.build(tokenizer, processes or data.prepare_processes, say)
        return plan.report(tokenizer, built)


def is_prepared(data: DataSection) -> bool:
    """Tell whether the folder holds a finished preparation with these settings. The source files themselves
    are not looked at (they may be on another machine); `prepare` does."""
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
    """Say what has happened to the sources of a finished preparation since, by names, sizes, times and
    samples of files; None also where they cannot be looked at, as they may be on another machine."""
    try:
        plan = _Plan(data, (1, 1))
        for unit in plan.units:
            path = unit.sidecar(plan.folder)
            if not path.is_file():
                return f"{unit.inputs[0].label} is new"
            section = data.sources[unit.source]
            if (found := other_files(path, read_sidecar(path), unit, section, "samples")) is not None:
                return found
    except DataError:
        return None
    return next((f"{path} belongs to no source any more" for path in plan.stale()), None)


def _settings(data: DataSection) -> dict[str, Any]:
    """List what a preparation depends on, as the recipe says it."""
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

    def __init__(self, data: DataSection, part: tuple[int, int], contents: bool = False) -> None:
        """`contents`: finished shards are read whole, to find those that are damaged."""
        if not data.sources:
            raise DataError("data.sources is empty; name at least one source with its paths")
        self.data, self._contents = data, contents
        self.folder = Path(data.folder)
        self.inputs: dict[str, list[Input]] = {}
        self.skips: dict[str, Skips] = {}
        for name, section in data.sources.items():
            if not name or name.startswith(".") or not all(c.isalnum() or c in "-_." for c in name):
                raise DataError(f"source name {name!r}: use letters, digits, '-', '_' and '.'")
            self.skips[name] = Skips()
            self.inputs[name] = list_inputs(name, section, self.skips[name])
            self._refuse_own_files(name)
        self.units = [unit for name, inputs in self.inputs.items() for unit in make_units(name, inputs)]
        self.own = self.units[part[0] - 1 :: part[1]]

    def changes(self) -> list[str]:
        """Say everything in the folder that no longer fits the sources and settings."""
        made = self.folder / "tokenizer.json"
        if not made.is_file():
            return []
        try:
            was = read_json(made, TOKENIZER_FACTS)["made_from"]
            tokenizer = Tokenizer.load(self.folder / "tokenizer.model")
        except DataError as error:
            return [str(error)]
        now = self._tokenizer_source()
        if was != now:
            return [
                f"tokenizer: {key} was {was.get(key)!r}, is now {now.get(key)!r}"
                for key in sorted(was.keys() | now.keys())
                if was.get(key) != now.get(key)
            ]
        found = [self._difference(unit, tokenizer) for unit in self.own if self._made(unit)]
        return [why for why in found if why] + [
            f"{path} belongs to no source any more" for path in self.stale()
        ]

    def stale(self) -> list[Path]:
        """List sidecars of shards that no source has any more."""
        known = {unit.sidecar(self.folder) for unit in self.units}
        return sorted(path for path in self.folder.glob("*/*.json") if path not in known)

    def remove_stale(self) -> None:
        """Remove shards that no source has any more."""
        for path in self.stale():
            for suffix in (".json", ".index.npy", ".tokens"):
                path.with_suffix(suffix).unlink(missing_ok=True)

    def tokenizer(self, again: bool, say: Say) -> Tokenizer:
        """Load the folder's tokenizer; train or copy it first when it is not there, or `again`."""
        path, made = self.folder / "tokenizer.model", self.folder / "tokenizer.json"
        if made.is_file() and not again:
            return Tokenizer.load(path)
        if self.data.tokenizer is not None:
            tokenizer, notes = Tokenizer.load(self.data.tokenizer), TrainingNotes()
        else:
            sources = {name: (section, self.inputs[name]) for name, section in self.data.sources.items()}
            sample = training_sample(sources, self.data.tokenizer_sample_bytes)
            millions = sum(map(len, sample)) / 1e6
            say(f"training a tokenizer of {self.data.vocab_size} ids on {millions:.1f} million characters")
            tokenizer, notes = train_tokenizer(sample, self.data.vocab_size)
        tokenizer.save(path)
        content = {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "notes": asdict(notes),
            "made_from": self._tokenizer_source(),
        }
        write_json(made, content)
        return tokenizer

    def build(self, tokenizer: Tokenizer, processes: int | None, say: Say) -> int:
        """Build the shards that are not finished; returns their number."""
        todo = [unit for unit in self.own if not self._made(unit) or self._difference(unit, tokenizer)]
        size = sum(unit.size for unit in todo)
        if todo:
            say(f"{len(todo)} of {len(self.own)} shards to make, from {size / 1e6:.1f} MB of files")
        processes = min(processes or len(os.sched_getaffinity(0)), len(todo))
        if processes > 1 and size >= WORTH_PROCESSES:
            build_in_processes(self.folder, self.data.sources, todo, processes, say)
        else:
            for unit in todo:
                build(self.folder, unit, self.data.sources[unit.source], tokenizer)
        return len(todo)

    def report(self, tokenizer: Tokenizer, built: int) -> Report:
        """Sum up what is finished; written to report.json when no shard is missing."""
        notes = read_json(self.folder / "tokenizer.json", TOKENIZER_FACTS)["notes"]
        report = Report(
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            _settings(self.data),
            tokenizer_notes=notes,
            missing=[f"{unit.source}/{unit.name}" for unit in self.units if not self._made(unit)],
            built=built,
            kept=len(self.own) - built,
        )
        for name, section in self.data.sources.items():
            units = [unit for unit in self.units if unit.source == name]
            report.sources[name] = report_source(self.folder, units, section.validation, self.skips[name])
        if not report.missing:
            for left in self.folder.rglob(f"*{PARTIAL}"):  # of interrupted preparations
                left.unlink()
            write_json(self.folder / "report.json", report.to_json())
        return report

    def _refuse_own_files(self, name: str) -> None:
        own = self.folder.resolve()
        for item in self.inputs[name]:
            if Path(item.path).resolve().is_relative_to(own):
                raise DataError(f"source {name} reads {item.label} inside data.folder {self.folder} itself")

    def _tokenizer_source(self) -> dict[str, Any]:
        """List what the tokenizer is made from."""
        if self.data.tokenizer is not None:
            return {"given": Tokenizer.load(self.data.tokenizer).fingerprint}
        return {
            "vocab_size": self.data.vocab_size,
            "sample_bytes": self.data.tokenizer_sample_bytes,
            "text_key": {name: section.text_key for name, section in self.data.sources.items()},
            "validation": {name: section.validation for name, section in self.data.sources.items()},
            "files": {name: _listing(inputs) for name, inputs in self.inputs.items()},
        }

    def _made(self, unit: Unit) -> bool:
        return unit.sidecar(self.folder).is_file()

    def _difference(self, unit: Unit, tokenizer: Tokenizer) -> str | None:
        section = self.data.sources[unit.source]
        return difference(self.folder, unit, section, tokenizer, self._contents)


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Let one preparation of a part run at a time; a second waits, and then finds the work done."""
    with ExitStack() as stack:
        try:
            missing = stack.enter_context(lock(path, wait=True))
        except OSError as error:
            raise DataError(
                f"{path} cannot be opened to lock {path.parent} ({error.strerror}): remove it, or give "
                "another data.folder"
            ) from error
        if missing is not None:
            say(
                f"{path} cannot be locked ({missing.strerror}): going on without a lock; see to it that no "
                "other process prepares this part, or give a data.folder on a file system with locks"
            )
        yield


def _refusal(folder: Path, changes: list[str]) -> str:
    more = len(changes) - MOST_SHOWN
    shown = [*changes[:MOST_SHOWN], f"and {more} more"] if more > 0 else changes
    return (
        f"{folder} was prepared from other sources or settings:\n  "
        + "\n  ".join(shown)
        + "\nprepare again with --force to rebuild it, or choose another data.folder"
    )


def _listing(inputs: list[Input]) -> str:
    """Digest the files' names, formats and sizes."""
    text = json.dumps([(item.label, item.format, item.size) for item in inputs])
    return f"{len(inputs)} files, {hashlib.sha256(text.encode()).hexdigest()[:16]}"
