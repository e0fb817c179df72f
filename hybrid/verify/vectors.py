"""A folder of stored vectors: its index files, its cases, their tensors.

`index.json` lists cases of level "core" (the KVM operator) and "model"; `mixers_index.json` has cases of
other mixers by name, each with a kind. A case is one safetensors file that the index names and describes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid.errors import UserError

INDEXES = ("index.json", "mixers_index.json")

Tensors = Mapping[str, Tensor]


class VerifyError(UserError):
    """A folder without readable vectors; the message names the file."""


class CaseError(UserError):
    """A case whose file is missing, damaged or not what the index says."""


@dataclass(frozen=True)
class Case:
    """Stored case: where it lies and its entry of the index."""

    name: str
    folder: Path
    entry: Mapping[str, Any]

    @property
    def level(self) -> str | None:
        return self.entry.get("level")

    @property
    def kind(self) -> str | None:
        return self.entry.get("kind")

    @property
    def config(self) -> Mapping[str, Any]:
        return self.entry["config"]

    def tensors(self) -> dict[str, Tensor]:
        """Read the case's tensors, which must be those that the index lists."""
        path = self.folder / self.entry["file"]
        try:
            tensors = load_file(path)
        except FileNotFoundError as error:
            raise CaseError(f"{path.name} is missing") from error
        except (OSError, SafetensorError) as error:
            raise CaseError(f"{path.name} is damaged ({error})") from error
        for name, listed in self.entry["tensors"].items():
            dtype, shape = (listed["dtype"], listed["shape"]) if isinstance(listed, dict) else listed
            if name not in tensors:
                raise CaseError(f"{path.name} has no tensor '{name}'")
            found = str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)
            if found != (dtype, list(shape)):
                raise CaseError(f"tensor '{name}' is {found[0]} {found[1]}, the index says {dtype} {shape}")
        return tensors


def read_cases(folder: str | os.PathLike[str]) -> list[Case]:
    """List the cases of a folder's index files. VerifyError without an index that is readable."""
    root = Path(folder)
    if not root.is_dir():
        raise VerifyError(f"{root}: no such folder")
    found = [root / name for name in INDEXES if (root / name).exists()]
    if not found:
        raise VerifyError(f"{root}: no vectors here (neither {' nor '.join(INDEXES)})")
    return [Case(name, root, entry) for index in found for name, entry in _entries(index)]


def _entries(index: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        cases = json.loads(index.read_text(encoding="utf-8"))["cases"]
        if isinstance(cases, dict):
            return [(str(name), dict(case)) for name, case in cases.items()]
        return [(str(case.get("file", "?")).removesuffix(".safetensors"), dict(case)) for case in cases]
    except OSError as error:
        raise VerifyError(f"{index}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise VerifyError(f"{index}: not valid JSON (line {error.lineno}: {error.msg})") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        kind = type(error).__name__
        raise VerifyError(f"{index}: has no readable list of cases ({kind}: {error})") from error


def below(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """Select the tensors whose names start with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def gradient(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf, zeros where nothing reached it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
