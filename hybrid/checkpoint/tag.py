"""One checkpoint on disk, called a tag after its folder's name.

    checkpoints/
      latest                     the newest tag's name, for people and other tools; training does not need it
      step_00000100/
        model.safetensors        all weights in fp32
        optimizer.safetensors    the optimizer's moments and counts of updates (both: see `statefiles`)
        trainer.json             where training stood, and with which recipe
        manifest.json            size and SHA-256 of every other file

A tag is written as `step_...partial` and renamed when every byte is on disk, so a crash leaves the older
ones as they were. A tag is never written twice: one that training passes again, having gone back, is set
aside.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.errors import TrainError
from hybrid.files import sha256

from .tensor_files import Reader, weight_files

if TYPE_CHECKING:
    from torch import Tensor

TAG = re.compile(r"step_(\d{8})")
ASIDE = ".aside"
"""Ends the name of a tag that is damaged or belongs to an abandoned continuation."""
TRAINER, MANIFEST, LATEST = "trainer.json", "manifest.json", "latest"


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
    """What a checkpoint was written by; compared with what goes on from it."""

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
    return sums if TRAINER in sums else f"{MANIFEST} does not list {TRAINER}"


def file_fault(path: Path, size: int, digest: str, *, contents: bool = True) -> str | None:
    """How a file differs from what was written; `contents`: read it whole."""
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


def read_trainer(path: Path) -> tuple[Progress, Origin]:
    """What stands in a tag's trainer.json; TrainError where it is of another version, or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Progress(**found["progress"]), Origin(**found["origin"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{path} is damaged, or of another version of this program ({error})") from None


def newest_weights(run: Path | str) -> Path:
    """The folder with the newest whole weights of a run directory, or `run` if it holds weights itself.

    Damaged ones are passed over, which is said on standard error. TrainError when there are none.
    """
    run = Path(run)
    if weight_files(run):
        return run
    faults: list[str] = []
    for tag in reversed(tags_in(run / "checkpoints")):
        folder = run / "checkpoints" / tag
        if (fault := _weights_fault(folder)) is None:
            if faults:
                print(f"{run}: {'; '.join(faults)}: taking {tag}", file=sys.stderr, flush=True)
            return folder
        faults.append(f"{tag} is damaged ({fault})")
    found = "; ".join(faults) or "neither model.safetensors nor a checkpoint below checkpoints/"
    raise TrainError(f"{run} holds no whole weights: {found}")


def _weights_fault(folder: Path) -> str | None:
    sums = read_manifest(folder)
    if isinstance(sums, str):
        return sums
    weights = [name for name in sums if name.startswith("model") and name.endswith(".safetensors")]
    if not weights:
        return f"{MANIFEST} does not list any weights"
    return next(filter(None, (file_fault(folder / name, *sums[name]) for name in weights)), None)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder, which `newest_weights` found; TrainError when they are damaged."""
    reader = Reader(folder)
    return {name: reader.weight(name) for name in reader.weights}


def tokenizer_of(weights: Path) -> str | None:
    """Fingerprint of the tokenizer that weights in a checkpoint's folder were trained with; None for weights
    that lie elsewhere. TrainError when the record of it is damaged."""
    record = weights / TRAINER
    return read_trainer(record)[1].tokenizer if record.is_file() else None
