"""Checkpoints that are whole or not there.

    checkpoints/
      latest                     the newest tag's name, for people and other tools; training does not need it
      step_00000100/
        *_states.pt              DeepSpeed's files, one set per rank: weights, masters, moments
        model.safetensors        all weights in fp32
        trainer.json             where training stood, and with which recipe
        manifest.json            size and SHA-256 of every other file

A tag is written as `step_...partial` and renamed when every byte is on disk, so a crash leaves the older
ones as they were. A tag is never written twice: one that training passes again, having gone back, is set
aside.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .distributed import TrainError, World
from .engine import Engine

if TYPE_CHECKING:
    from torch import Tensor

TAG = re.compile(r"step_(\d{8})")
PARTIAL = ".partial"
ASIDE = ".aside"
"""Ends the name of a tag that is damaged or belongs to an abandoned continuation."""
WEIGHTS, TRAINER, MANIFEST, LATEST = "model.safetensors", "trainer.json", "manifest.json", "latest"


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
    bits_per_byte_before: float | None = None
    """On held-out text before the first step."""


@dataclass
class Origin:
    """What a checkpoint was written by; checked before it is loaded."""

    world_size: int
    zero_stage: int
    precision: str
    tokenizer: str
    """The tokenizer's fingerprint."""
    recipe: dict[str, Any] = field(default_factory=dict)


Manifest = dict[str, tuple[int, str]]
"""File name -> bytes, SHA-256."""


def tag_name(step: int) -> str:
    return f"step_{step:08d}"


class Checkpoints:
    """The checkpoints folder of a run. Every method is called by all ranks."""

    def __init__(self, folder: Path, keep_last: int, world: World) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.world = world

    def save(self, engine: Engine, progress: Progress, origin: Origin) -> Path:
        """Write a new tag, then drop the oldest beyond `keep_last`.

        Raises TrainError, leaving older tags as they are, when it cannot be written.
        """
        final = self.folder / tag_name(progress.step)
        partial = final.with_name(final.name + PARTIAL)
        try:
            self.world.on_main(lambda: self._make_room(partial))
            engine.save(str(self.folder), partial.name)
            weights = engine.weights()
            self.world.on_main(lambda: self._write_rest(partial, weights, progress, origin))
            sums = self._checksums(partial)
            self.world.on_main(lambda: self._finish(partial, final, sums))
        except (OSError, TrainError) as error:  # of this rank, or another's
            raise self._failed(partial, error) from error
        self.world.on_main(self._prune)
        return final

    def find(self, resume: str) -> str | None:
        """The tag to go on from, or None for a fresh start; says on the terminal why newer ones were left.

        Args:
            resume: "auto", "never" or a tag.

        Raises TrainError: the tag asked for is absent or damaged, all are damaged, ranks see different
        checkpoints, or "never" meets a folder with checkpoints.
        """
        tags = tags_in(self.folder)
        self.world.same("the checkpoints they see", ", ".join(tags) or "none")
        if resume == "never":
            if tags:
                self.world.agree(
                    TrainError(
                        f"{self.folder} already holds checkpoints ({tags[-1]} is the newest): give another "
                        "train.output, or train.resume=auto to go on from there"
                    )
                )
            return None
        if resume != "auto":
            self._demand(resume, tags)
            return resume
        return self._newest_whole(tags)

    def read(self, tag: str) -> tuple[Progress, Origin]:
        """What stands in a whole tag's trainer.json."""
        return read_trainer(self.folder / tag / TRAINER)

    def set_newer_aside(self, step: int) -> None:
        """Rename tags beyond `step`: damaged, or of a continuation that is now abandoned."""

        def rename() -> None:
            for tag in tags_in(self.folder):
                if tag > tag_name(step):
                    aside = self.folder / (tag + ASIDE)
                    shutil.rmtree(aside, ignore_errors=True)
                    os.rename(self.folder / tag, aside)

        self.world.on_main(rename)

    def _make_room(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(leftover)
        partial.mkdir()

    def _write_rest(self, partial: Path, weights: dict[str, Any], progress: Progress, origin: Origin) -> None:
        from safetensors.torch import save_file

        try:
            save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        except Exception as error:  # safetensors' own class, for input and output errors too
            raise OSError(f"could not write {partial / WEIGHTS}: {error}") from error
        write_json(partial / TRAINER, {"progress": asdict(progress), "origin": asdict(origin)})

    def _checksums(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of a folder's files; the ranks share the reading."""
        mine: dict[str, dict[str, Any]] = {}
        with self.world.together():
            for index, path in enumerate(sorted(folder.iterdir())):
                if index % self.world.size == self.world.rank and path.name != MANIFEST:
                    mine[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        return {name: entry for part in self.world.gather(mine) for name, entry in part.items()}

    def _finish(self, partial: Path, final: Path, sums: dict[str, dict[str, Any]]) -> None:
        for name in sums:
            sync(partial / name)
        write_json(partial / MANIFEST, {"files": sums})
        sync(partial)
        os.rename(partial, final)
        temporary = self.folder / f"{LATEST}.tmp"
        temporary.write_text(final.name + "\n", encoding="utf-8")
        sync(temporary)
        os.replace(temporary, self.folder / LATEST)
        sync(self.folder)

    def _failed(self, partial: Path, error: OSError | TrainError) -> TrainError:
        """Remove what was begun, to give its space back."""
        if self.world.main:
            shutil.rmtree(partial, ignore_errors=True)
        newest = tags_in(self.folder)[-1:]
        kept = f"the newest good checkpoint is {newest[0]}" if newest else "there is no earlier checkpoint"
        reason = getattr(error, "strerror", None) or str(error)
        return TrainError(f"could not write checkpoint {self.folder / partial.stem}: {reason}; {kept}")

    def _prune(self) -> None:
        tags = tags_in(self.folder)
        for tag in tags[: -self.keep_last]:
            shutil.rmtree(self.folder / tag)
        for aside in self.folder.glob(f"step_*{ASIDE}"):
            if aside.stem <= tags[-1]:  # training has come as far again
                shutil.rmtree(aside)

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
            self.world.agree(
                TrainError(
                    f"no checkpoint in {self.folder} is whole: {'; '.join(faults)}. Restore one, or start "
                    "afresh with another train.output"
                )
            )
        if self.folder.is_dir() and list(self.folder.glob(f"*{PARTIAL}")):
            self._explain(["only an unfinished checkpoint was found"], "starting from the beginning")
        return None

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


def tags_in(folder: Path) -> list[str]:
    """Names of complete tags (whole or damaged since), oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if TAG.fullmatch(path.name) and path.is_dir())


def read_manifest(folder: Path) -> Manifest | str:
    """What a tag's files should be, or why that is unknown."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        sums = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is unreadable"
    absent = [name for name in (WEIGHTS, TRAINER) if name not in sums]
    return f"{MANIFEST} does not list {absent[0]}" if absent else sums


def file_fault(path: Path, size: int, digest: str, *, contents: bool = True) -> str | None:
    """How a file differs from what was written; `contents`: read it whole."""
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size} bytes instead of {size}"
    if contents and sha256(path) != digest:
        return f"{path.name} has other contents than were written"
    return None


def read_trainer(path: Path) -> tuple[Progress, Origin]:
    """What stands in a tag's trainer.json; TrainError where it is of another version, or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Progress(**found["progress"]), Origin(**found["origin"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{path} is damaged, or of another version of this program ({error})") from None


def newest_weights(run: Path | str) -> Path:
    """The newest whole `model.safetensors` of a run directory, or that of a folder that holds one itself.

    A damaged one is passed over, which is said on standard error. TrainError when there is none.
    """
    run = Path(run)
    if (run / WEIGHTS).is_file():
        return run / WEIGHTS
    faults: list[str] = []
    for tag in reversed(tags_in(run / "checkpoints")):
        folder = run / "checkpoints" / tag
        sums = read_manifest(folder)
        fault = sums if isinstance(sums, str) else file_fault(folder / WEIGHTS, *sums[WEIGHTS])
        if fault is None:
            if faults:
                print(f"{run}: {'; '.join(faults)}: taking {tag}", file=sys.stderr, flush=True)
            return folder / WEIGHTS
        faults.append(f"{tag} is damaged ({fault})")
    found = "; ".join(faults) or f"neither {WEIGHTS} nor a checkpoint below checkpoints/"
    raise TrainError(f"{run} holds no whole weights: {found}")


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; TrainError when it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise TrainError(f"{path} is damaged or no safetensors file: {error}") from None


def tokenizer_of(weights: Path) -> str | None:
    """Fingerprint of the tokenizer that weights in a checkpoint were trained with; None for weights that lie
    elsewhere. TrainError when the record of it is damaged."""
    record = weights.with_name(TRAINER)
    return read_trainer(record)[1].tokenizer if record.is_file() else None


def write_json(path: Path, value: Any) -> None:
    """Write and sync; the caller renames where readers could see a half-written file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
