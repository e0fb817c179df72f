"""The checkpoints folder of a run: which tag to go on from, and which to keep."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from hybrid.distributed.world import TrainError, World
from hybrid.files import PARTIAL, sync, write_text

from .tag import (
    ASIDE,
    LATEST,
    TRAINER,
    Manifest,
    Origin,
    Progress,
    file_fault,
    read_manifest,
    read_trainer,
    tag_name,
    tags_in,
)

COPIED_AT_ONCE = 2**26
"""Bytes."""


class Checkpoints:
    """Every method is called by all ranks, but for those that say who."""

    def __init__(self, folder: Path, keep_last: int, world: World, copy: Path | None = None) -> None:
        """`copy`: a second folder that gets a copy of every checkpoint."""
        self.folder, self.copy = folder, copy
        self.keep_last = keep_last
        self.world = world

    def find(self, resume: str) -> str | None:
        """The tag to go on from, or None for a fresh start; says on the terminal why newer ones were left.

        Args:
            resume: "auto", "never" or a tag.

        Raises TrainError: the tag asked for is absent or damaged, all are damaged or only copies are left,
        ranks see different checkpoints, or "never" meets a folder with checkpoints.
        """
        tags = tags_in(self.folder)
        self.world.same("the checkpoints they see", ", ".join(tags) or "none")
        if resume not in ("auto", "never"):
            self._demand(resume, tags)
            return resume
        if not tags and (offer := self._offer()):
            self.world.agree(TrainError(f"there is no checkpoint in {self.folder}. {offer}"))
        if resume == "auto":
            return self._newest_whole(tags)
        if tags:
            self.world.agree(
                TrainError(
                    f"{self.folder} already holds checkpoints ({tags[-1]} is the newest): give another "
                    "train.output, or train.resume=auto to go on from there"
                )
            )
        return None

    def read(self, tag: str) -> tuple[Progress, Origin]:
        """What stands in a whole tag's trainer.json."""
        return read_trainer(self.folder / tag / TRAINER)

    def set_newer_aside(self, step: int) -> None:
        """Rename tags beyond `step`: damaged, or of a continuation that is now abandoned."""

        def rename() -> None:
            for folder in filter(None, (self.folder, self.copy)):
                for tag in tags_in(folder):
                    if tag > tag_name(step):
                        aside = folder / (tag + ASIDE)
                        shutil.rmtree(aside, ignore_errors=True)
                        os.rename(folder / tag, aside)

        self.world.on_main(rename)

    def make_room(self, partial: Path) -> None:
        """Main rank only: an empty folder for a tag to be written, and no leftovers of others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(leftover)
        partial.mkdir()

    def publish(self, partial: Path) -> None:
        """Main rank only: give a written tag its name, then drop the oldest beyond `keep_last`."""
        _publish(partial, self.keep_last)

    def publish_copy(self, tag: str, on_chunk: Callable[[], None]) -> None:
        """Main rank only: copy a tag to the second folder, if there is one, and drop its oldest too."""
        if self.copy is None:
            return
        self.copy.mkdir(parents=True, exist_ok=True)
        partial = self.copy / (tag + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for path in (self.folder / tag).iterdir():
            _copy(path, partial / path.name, on_chunk)
        _publish(partial, self.keep_last)

    def _demand(self, tag: str, tags: list[str]) -> None:
        if tag not in tags:
            listed = ", ".join(tags) or "none"
            self.world.agree(TrainError(f"no checkpoint '{tag}' in {self.folder}; there are: {listed}"))
        fault = self._fault(tag)
        if fault:
            self.world.agree(TrainError(f"checkpoint {self.folder / tag} is damaged: {fault}"))

    def _newest_whole(self, tags: list[str]) -> str | None:
        faults: list[str] = []
        for tag in reversed(tags):
            fault = self._fault(tag)
            if fault is None:
                self._explain(faults, f"going back to {tag}")
                return tag
            faults.append(f"{tag} is damaged ({fault})")
        if faults:
            words = f"no checkpoint in {self.folder} is whole: {'; '.join(faults)}. "
            words += self._offer() or "Restore one, or start afresh with another train.output"
            self.world.agree(TrainError(words))
        if self.folder.is_dir() and list(self.folder.glob(f"*{PARTIAL}")):
            self._explain(["only an unfinished checkpoint was found"], "starting from the beginning")
        return None

    def _offer(self) -> str | None:
        """How to go on from the second folder, if something is there."""
        copies = tags_in(self.copy) if self.copy else []
        if not copies:
            return None
        return (
            f"{self.copy} has copies ({', '.join(copies)}): copy one to {self.folder}, or give another "
            "train.output and train.checkpoint_copy"
        )

    def _explain(self, reasons: list[str], then: str) -> None:
        if reasons and self.world.main:
            print(f"checkpoints: {'; '.join(reasons)}: {then}", flush=True)

    def _fault(self, tag: str) -> str | None:
        """Why a tag cannot be used; the same answer on every rank."""
        sums = read_manifest(self.folder / tag)
        fault = sums if isinstance(sums, str) else self._compare(self.folder / tag, sums)
        return next((found for found in self.world.gather(fault) if found), None)

    def _compare(self, folder: Path, sums: Manifest) -> str | None:
        """The first file that is not as the manifest says; ranks share the reading of contents."""
        for index, name in enumerate(sorted(sums)):
            mine = index % self.world.size == self.world.rank
            if fault := file_fault(folder / name, *sums[name], contents=mine):
                return fault
        return None


def _copy(source: Path, target: Path, on_chunk: Callable[[], None]) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        while chunk := old.read(COPIED_AT_ONCE):
            new.write(chunk)
            on_chunk()
        new.flush()
        os.fsync(new.fileno())


def _publish(partial: Path, keep_last: int) -> None:
    folder, tag = partial.parent, partial.name.removesuffix(PARTIAL)
    sync(partial)
    os.rename(partial, folder / tag)
    write_text(folder / LATEST, tag + "\n")
    sync(folder)
    tags = tags_in(folder)
    for old in tags[:-keep_last]:
        shutil.rmtree(folder / old)
    for aside in folder.glob(f"step_*{ASIDE}"):
        if aside.stem <= tags[-1]:  # training has come as far again
            shutil.rmtree(aside)
