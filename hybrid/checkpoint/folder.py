"""The checkpoints of a run on disk; one is called a tag after its folder's name.

    checkpoints/
      latest                     the newest tag's name, for people and other tools; training does not need it
      step_00000100/
        model.safetensors        all weights in fp32
        optimizer.safetensors    the optimizer's moments and counts of updates (both: see `tensor_files`)
        trainer.json             where training stood, and with which recipe
        manifest.json            size and SHA-256 of every other file

A tag is written as `step_...partial` and renamed when every byte is on disk, so a crash leaves the older
ones as they were. A tag is never written twice: one that training passes again, having gone back, is set
aside.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid.distributed.world import World
from hybrid.errors import TrainError, words
from hybrid.files import PARTIAL, replacing, sha256, sync, write_text

from .tensor_files import SUFFIX

TAG = re.compile(r"step_(\d{8})")
ASIDE = ".aside"
"""Ends the name of a tag that is damaged or belongs to an abandoned continuation."""
TRAINER, MANIFEST, LATEST = "trainer.json", "manifest.json", "latest"
COPIED_AT_ONCE = 2**26
"""Bytes."""

Manifest = dict[str, tuple[int, str]]
"""File name -> bytes, SHA-256."""


@dataclass
class Progress:
    """Where training stands between two steps."""

    step: int = 0
    """Finished steps, skipped ones included."""
    sample: int = 0
    """Windows taken from the data so far, over all processes."""
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    empty: int = 0
    """Steps without a counted token, which change nothing; not among the skipped ones."""
    bits_per_byte_before: float | None = None
    """On held-out text before the first step."""
    text_before: str | None = None
    """Fingerprint of that text; None: an earlier version kept none."""


@dataclass
class Origin:
    """What a checkpoint was written by; compared with what goes on from it."""

    world_size: int
    zero_stage: int
    precision: str
    tokenizer: str
    """The tokenizer's fingerprint."""
    recipe: dict[str, Any] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each source holds (`Store.describe`); empty: an earlier version kept nothing of it."""


def tag_name(step: int) -> str:
    """Name the tag of a step."""
    return f"step_{step:08d}"


def tags_in(folder: Path) -> list[str]:
    """List complete tags (whole or damaged since), oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if TAG.fullmatch(path.name) and path.is_dir())


def read_manifest(tag: Path) -> Manifest | str:
    """Read what a tag's files should be, or why that is unknown."""
    try:
        files = json.loads((tag / MANIFEST).read_text(encoding="utf-8"))["files"]
        sums = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is unreadable"
    return sums if TRAINER in sums else f"{MANIFEST} does not list {TRAINER}"


def file_fault(path: Path, size: int, digest: str, *, contents: bool = True) -> str | None:
    """Compare a file with what was written; `contents`: read it whole. None when nothing differs."""
    try:
        if path.stat().st_size != size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
        if contents and sha256(path) != digest:
            return f"{path.name} has other contents than were written"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None


def record_fault(tag: Path, sums: Manifest) -> str | None:
    """Say why a tag whose files are as they were written is none: tensors that its manifest does not list,
    which would be read with the others, or no record of its step."""
    if surplus := sorted(path.name for path in tag.glob(f"*{SUFFIX}") if path.name not in sums):
        return f"{surplus[0]} is not in {MANIFEST}"
    try:
        step = read_trainer(tag)[0].step
    except TrainError as error:
        return str(error)
    return f"{TRAINER} is of step {step}" if TAG.fullmatch(tag.name) and tag.name != tag_name(step) else None


def read_trainer(tag: Path) -> tuple[Progress, Origin]:
    """Read a tag's trainer.json; TrainError where it is of another version, or damaged."""
    path = tag / TRAINER
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        progress, origin = Progress(**found["progress"]), Origin(**found["origin"])
        for value, kind in ((progress.step, int), (origin.recipe, dict), (origin.tokenizer, str)):
            if not isinstance(value, kind):
                raise ValueError(f"{value!r} is no {kind.__name__}")
        return progress, origin
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{path} is damaged, or of another version of this program ({error})") from None


class CheckpointFolder:
    """The tags of a run. All ranks call every method, but for those that say who."""

    def __init__(self, path: Path, keep_last: int, world: World, copy: Path | None = None) -> None:
        """`copy`: a second folder that gets a copy of every checkpoint."""
        self.path, self.copy = path, copy
        self._keep_last, self._world = keep_last, world

    def find(self, resume: str) -> str | None:
        """Find the tag to go on from, None for a fresh start; says on the terminal why newer ones were left.

        Args:
            resume: "auto", "never" or a tag.

        Raises TrainError: the tag asked for is absent or damaged, all are damaged or only copies are left,
        ranks see different checkpoints, or "never" meets a folder with checkpoints.
        """
        tags = tags_in(self.path)
        self._world.check_equal("the checkpoints they see", ", ".join(tags) or "none")
        if resume not in ("auto", "never"):
            if resume not in tags:
                self._stop(f"no checkpoint '{resume}' in {self.path}; there are: {', '.join(tags) or 'none'}")
            if fault := self._fault(resume):
                self._stop(f"checkpoint {self.path / resume} is damaged: {fault}")
            return resume
        if not tags and (offer := self._offer()):
            self._stop(f"there is no checkpoint in {self.path}. {offer}")
        if resume == "auto":
            return self._newest_whole(tags)
        if tags:
            self._stop(
                f"{self.path} already holds checkpoints ({tags[-1]} is the newest): give another "
                "train.output, or train.resume=auto to go on from there"
            )
        return None

    def set_newer_aside(self, step: int) -> None:
        """Rename tags beyond `step`: damaged, or of a continuation that is now abandoned."""

        def rename() -> None:
            for folder in filter(None, (self.path, self.copy)):
                for tag in tags_in(folder):
                    if tag > tag_name(step):
                        aside = folder / (tag + ASIDE)
                        shutil.rmtree(aside, ignore_errors=True)
                        os.rename(folder / tag, aside)

        self._world.rank0_only(rename)

    def make_room(self, partial: Path) -> None:
        """Main rank only: make an empty folder for a tag to be written, and remove leftovers of killed saves.

        A link in a leftover's place is removed, not followed.
        """
        folder = partial.parent
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"*{PARTIAL}"):
            if leftover.name.startswith(("step_", f".{LATEST}.")):
                with suppress(OSError):
                    is_folder = leftover.is_dir() and not leftover.is_symlink()
                    shutil.rmtree(leftover) if is_folder else leftover.unlink()
        partial.mkdir()

    def publish(self, partial: Path) -> list[str]:
        """Main rank only: give a written tag its name, then drop the oldest beyond `keep_last`; returns which
        could not be deleted, and why."""
        folder, tag = partial.parent, partial.name.removesuffix(PARTIAL)
        sync(partial)
        os.rename(partial, folder / tag)
        write_text(folder / LATEST, tag + "\n")
        sync(folder)
        tags = tags_in(folder)
        needless = [folder / old for old in tags[: -self._keep_last]]
        # Set aside, and training has come as far again.
        needless += [aside for aside in folder.glob(f"step_*{ASIDE}") if aside.stem <= tags[-1]]
        problems = []
        for old in needless:
            try:
                shutil.rmtree(old)
            except OSError as error:
                problems.append(f"could not delete the old checkpoint {old}: {words(error)}")
        return problems

    def publish_copy(self, tag: str, on_chunk: Callable[[], None]) -> list[str]:
        """Main rank only: copy a tag to the second folder, if there is one, and drop its oldest too; returns
        which could not be deleted."""
        if self.copy is None:
            return []
        partial = self.copy / (tag + PARTIAL)
        self.make_room(partial)
        for path in (self.path / tag).iterdir():
            with open(path, "rb") as old, replacing(partial / path.name) as new:
                while chunk := old.read(COPIED_AT_ONCE):
                    new.write(chunk)
                    on_chunk()
        return self.publish(partial)

    def _stop(self, why: str) -> None:
        """Raise what all ranks have found alike."""
        self._world.raise_if_any(TrainError(why))

    def _newest_whole(self, tags: list[str]) -> str | None:
        faults: list[str] = []
        for tag in reversed(tags):
            fault = self._fault(tag)
            if fault is None:
                self._explain(faults, f"going back to {tag}")
                return tag
            faults.append(f"{tag} is damaged ({fault})")
        if faults:
            advice = self._offer() or "Restore one, or start afresh with another train.output"
            self._stop(f"no checkpoint in {self.path} is whole: {'; '.join(faults)}. {advice}")
        if self.path.is_dir() and list(self.path.glob(f"*{PARTIAL}")):
            self._explain(["only an unfinished checkpoint was found"], "starting from the beginning")
        return None

    def _offer(self) -> str | None:
        """Say how to go on from the second folder, if something is there."""
        copies = tags_in(self.copy) if self.copy else []
        if not copies:
            return None
        return (
            f"{self.copy} has copies ({', '.join(copies)}): copy one to {self.path}, or give another "
            "train.output and train.checkpoint_copy"
        )

    def _explain(self, reasons: list[str], then: str) -> None:
        if reasons and self._world.main:
            print(f"checkpoints: {'; '.join(reasons)}: {then}", flush=True)

    def _fault(self, tag: str) -> str | None:
        """Find the first file that is not as the manifest says; the same answer on every rank.

        The ranks share the reading of contents.
        """
        sums = read_manifest(self.path / tag)
        fault = sums if isinstance(sums, str) else None
        if not isinstance(sums, str):
            for index, name in enumerate(sorted(sums)):
                mine = index % self._world.size == self._world.rank
                fault = fault or file_fault(self.path / tag / name, *sums[name], contents=mine)
            fault = fault or record_fault(self.path / tag, sums)
        return next((found for found in self._world.gather(fault) if found), None)
