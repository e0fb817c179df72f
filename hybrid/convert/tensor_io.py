"""Tensors of other programs' files, read one by one, and safetensors files written shard by shard."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybrid.errors import ConvertError
from hybrid.files import sync, write_json

from .common import LazyTensor, Tensors, unwrapped

SAFETENSORS = ".safetensors"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors files; others (quantised weights) are refused."""


def read_safetensors(paths: Iterable[Path]) -> Tensors:
    """List the tensors of safetensors files. ConvertError for damage, and a name that stands twice."""
    found: Tensors = {}
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 (not a dict)
                entry = file.get_slice(name)
                if name in found:
                    raise ConvertError(f"{path}: tensor '{name}' stands in another file too")
                if entry.get_dtype() not in DTYPES:
                    raise ConvertError(
                        f"{path}: tensor '{name}' is {entry.get_dtype()}, which is not supported"
                    )
                shape, dtype = tuple(entry.get_shape()), DTYPES[entry.get_dtype()]
                found[name] = LazyTensor(shape, dtype, partial(file.get_tensor, name))
        except SafetensorError as error:
            raise ConvertError(f"{path} is truncated, damaged or no safetensors file: {error}") from None
    return found


def load_torch(path: Path, stand_ins: Sequence[tuple[type, str]] = ()) -> Any:
    """Load a file of `torch.save`, its tensors mapped to memory; no code of the file is run.

    Args:
        stand_ins: (class, name of another program's class that is loaded as it).

    Raises ConvertError for damage, and for pickles of anything but tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"(?:class|type) (\S+)", str(error))
        what = f"{named[1]}, which is" if named else "what is"
        raise ConvertError(
            f"{path} holds {what} neither a tensor nor a plain value (or is damaged): a pickle can run any "
            "code when it is loaded, so this one is refused; save its state dict alone"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ConvertError(f"{path} is truncated, damaged or no file of torch.save: {error}") from None


def read_torch(paths: Iterable[Path]) -> tuple[Tensors, list[str]]:
    """List the tensors of state dicts; and in words which names stand for one tensor."""
    found: Tensors = {}
    notes: list[str] = []
    places: dict[tuple[Any, ...], str] = {}
    for path in paths:
        table = load_torch(path)
        while isinstance(table, dict) and (
            key := next(
                (k for k in ("state_dict", "module", "model") if isinstance(table.get(k), dict)), None
            )
        ):
            table = table[key]
        if not isinstance(table, dict) or not table:
            raise ConvertError(f"{path} holds no state dict but {type(table).__name__}")
        for name, tensor in table.items():
            if not isinstance(tensor, Tensor):
                raise ConvertError(
                    f"{path}: '{name}' is a {type(tensor).__name__}, not a tensor: no state dict"
                )
            if name in found:
                raise ConvertError(f"{path}: tensor '{name}' stands in another file too")
            found[str(name)] = LazyTensor.of(tensor)
            place = (path, tensor.data_ptr(), tuple(tensor.shape))
            if tensor.numel() and places.setdefault(place, name) != name:
                notes.append(f"{name} and {places[place]} are one tensor in {path.name}")
    return found, notes


def read_state_dict(path: Path) -> tuple[Tensors, list[str]]:
    """Read a file of weights, or the weights in a folder: safetensors files, else those of torch.save.

    Returns the tensors, without what wrappers put before their names, and notes for the report.
    """
    files, notes = [path], []
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in (SAFETENSORS, *TORCH_SUFFIXES))
        files = [p for p in found if p.suffix == SAFETENSORS] or found
        if not files:
            raise ConvertError(
                f"{path} holds no weights: no file of {SAFETENSORS}, {', '.join(TORCH_SUFFIXES)}"
            )
        if left := [p.name for p in found if p not in files]:
            notes.append(f"not read, beside safetensors files: {', '.join(left)}")
    if files[0].suffix == SAFETENSORS:
        return unwrapped(read_safetensors(files)), notes
    tensors, shared = read_torch(files)
    return unwrapped(tensors), notes + shared


def is_weights(path: Path) -> bool:
    """Whether a path is a file that may hold weights."""
    return path.is_file() and path.suffix in (SAFETENSORS, *TORCH_SUFFIXES)


def write_shards(
    folder: Path, tensors: Tensors, shard_bytes: int, on_tensor: Callable[[str, Tensor], None]
) -> None:
    """Write `model.safetensors`, or several files of at most `shard_bytes` (or one tensor) with an index.

    No more than one file's tensors are in memory. `on_tensor` is called with each.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        path, shard = folder / f"model{several}.safetensors", {}
        for name in names:
            shard[name] = tensors[name].read().clone(memory_format=torch.contiguous_format)
            on_tensor(name, shard[name])
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(folder.stat().st_mode & 0o666)  # else it is for its owner alone
        sync(path)
        index |= dict.fromkeys(names, path.name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
        )
