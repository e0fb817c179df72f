"""Weights and optimizer moments on disk: whole fp32 tensors by name, in safetensors files.

    model.safetensors          the weights: `NAME`
    optimizer.safetensors      the optimizer's state: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`

Beyond FILE_BYTES there are several files, as is usual: `model-00001-of-00003.safetensors` ... with an index.
What lies where depends on the model alone, never on processes, ZeRO stage or ranks per sequence: any number
of processes at any stage can write these files and read them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid.errors import TrainError
from hybrid.files import replacing

FILE_BYTES = 2**31
"""A file takes another tensor until it would be longer."""
MODEL, OPTIMIZER = "model", "optimizer"
STEP = "step"
"""The optimizer's count of updates, one scalar per parameter; its other entries are shaped like that."""
SUFFIX = ".safetensors"
INDEX = f"{MODEL}{SUFFIX}.index.json"


class Entry(NamedTuple):
    """One tensor in a file."""

    parameter: str
    key: str
    """Name in the optimizer's state; empty for the weight itself."""
    shape: tuple[int, ...]
    offset: int
    """Elements before it in the file."""

    @property
    def name(self) -> str:
        return f"{self.parameter}.{self.key}" if self.key else self.parameter

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """The tensors of one file, in order and without gaps."""

    name: str
    entries: tuple[Entry, ...]

    @property
    def elements(self) -> int:
        return self.entries[-1].end

    def header(self) -> bytes:
        """Format what stands before the numbers (safetensors: length, JSON, spaces up to 8 bytes)."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for entry in self.entries:
            table[entry.name] = {
                "dtype": "F32",
                "shape": list(entry.shape),
                "data_offsets": [4 * entry.offset, 4 * entry.end],
            }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def layout(
    shapes: dict[str, tuple[int, ...]], keys: Sequence[str], trained: Collection[str]
) -> list[TensorFile]:
    """Plan the files for weights of these shapes, and for entries `keys` of the optimizer's state of the
    `trained` ones."""
    files = _split(MODEL, [(name, "", shape) for name, shape in shapes.items()])
    found = [(name, shape) for name, shape in shapes.items() if name in trained]
    states = [(name, key, () if key == STEP else shape) for name, shape in found for key in keys]
    return files + (_split(OPTIMIZER, states) if states else [])


def _split(stem: str, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorFile]:
    files: list[list[Entry]] = [[]]
    end = 0
    for parameter, key, shape in tensors:
        if files[-1] and 4 * (end + math.prod(shape)) > FILE_BYTES:
            files.append([])
            end = 0
        files[-1].append(Entry(parameter, key, shape, end))
        end = files[-1][-1].end
    names = [f"{stem}-{i:05d}-of-{len(files):05d}{SUFFIX}" for i in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [f"{stem}{SUFFIX}"]
    return [TensorFile(name, tuple(entries)) for name, entries in zip(names, files, strict=True)]


def index(files: Sequence[TensorFile]) -> dict[str, object] | None:
    """Make the index that other programs look for beside weights in several files; None for one file."""
    weights = [file for file in files if file.name.startswith(f"{MODEL}-")]
    if not weights:
        return None
    return {
        "metadata": {"total_size": 4 * sum(file.elements for file in weights)},
        "weight_map": {entry.name: file.name for file in weights for entry in file.entries},
    }


def write(path: Path, header: bytes, chunks: list[Tensor], on_chunk: Callable[[], None]) -> tuple[int, str]:
    """Write a file to disk; returns its bytes and SHA-256.

    `chunks` (fp32 on the CPU, one after the other the file's numbers) is emptied on the way, to give the
    memory back early; `on_chunk` is called after each. Disk and hash work without holding up other threads.
    Raises OSError.
    """
    digest, size = hashlib.sha256(header), len(header)
    with replacing(path) as file:
        file.write(header)
        while chunks:
            data = chunks.pop(0).numpy().data.cast("B")
            file.write(data)
            digest.update(data)
            size += len(data)
            on_chunk()
    return size, digest.hexdigest()


class Reader:
    """Reads tensors from a folder's files one by one. Raises TrainError where a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._weights = _tensors(folder, MODEL)
        self._states = _tensors(folder, OPTIMIZER)

    @property
    def weights(self) -> list[str]:
        return list(self._weights)

    @property
    def keys(self) -> list[str]:
        """Which entries of the optimizer's state parameters have."""
        return sorted({name.rpartition(".")[2] for name in self._states})

    def weight(self, name: str) -> Tensor:
        return self._read(self._weights, name)

    def state(self, parameter: str, key: str) -> Tensor:
        return self._read(self._states, f"{parameter}.{key}")

    def _read(self, where: dict[str, Any], name: str) -> Tensor:
        if name not in where:
            raise TrainError(f"{self.folder} holds no {name}: it is of another version of this program")
        return where[name].get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    """List the files with weights in a folder; empty when it has none."""
    whole = folder / f"{MODEL}{SUFFIX}"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{MODEL}-*{SUFFIX}"))


def _tensors(folder: Path, stem: str) -> dict[str, Any]:
    """Open the files and map each tensor's name to the one it is in."""
    found: dict[str, Any] = {}
    for path in weight_files(folder) if stem == MODEL else sorted(folder.glob(f"{stem}*{SUFFIX}")):
        try:
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise TrainError(f"{path} is damaged or no safetensors file: {error}") from None
        found |= dict.fromkeys(opened.keys(), opened)
    return found
