"""Files of states: safetensors with texts beside the tensors, whole or absent, checked when read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybrid.errors import UserError

FORMAT = "hybrid-state-2"


class StateError(UserError):
    """A state that does not fit the model or the call, or a file that holds none; the message says which."""


def write(path: str | os.PathLike[str], texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write one file; it appears whole or not at all."""
    from safetensors.torch import save_file

    target = Path(path)
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    texts = {**texts, "format": FORMAT}
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        save_file(own, part, {**texts, "sha256": _digest(texts, own)})
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def read(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Texts and tensors of a file that `write` wrote. StateError when it is none, or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise StateError(f"{path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: cannot be read as a state ({error})") from error
    if texts.get("format") != FORMAT:
        found = texts.get("format")
        raise StateError(f"{path}: not a model state (format {found!r}, expected '{FORMAT}')")
    if texts.pop("sha256", None) != _digest(texts, tensors):
        raise StateError(
            f"{path}: the state is damaged (its content does not have the checksum it was given)"
        )
    return texts, {name: tensor.to(device) for name, tensor in tensors.items()}


def _digest(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    return digest_of(tensors, hashlib.sha256(json.dumps(sorted(texts.items())).encode()))


def digest_of(tensors: Mapping[str, Tensor], begun: hashlib._Hash | None = None) -> str:
    """SHA-256 over names, types, shapes and values, by name."""
    digest = hashlib.sha256() if begun is None else begun
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
