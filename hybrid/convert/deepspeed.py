"""Checkpoint folders that DeepSpeed writes itself: ZeRO stages 0 to 3, any number of processes.

    latest                                          the newest tag's name
    TAG/mp_rank_00_model_states.pt                  stages 0-2: the whole module, in the dtype it computes in
    TAG/zero_pp_rank_N_mp_rank_00_model_states.pt   stage 3: buffers, and each rank's share of frozen weights
    TAG/*zero_pp_rank_N_mp_rank_00_optim_states.pt  each rank's share of the fp32 masters

Neither DeepSpeed nor code of the folder is needed or run. Layouts as of deepspeed 0.19 (`zero_to_fp32.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.checkpoint.folder import LATEST
from hybrid.errors import ConvertError, NotSupported

from . import model_folder, paper_folder
from .common import Format, LazyTensor, Model, Options, Tensors, same_bits, short_list, unwrapped
from .tensor_io import load_torch

STATES = re.compile(r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
OTHER_PARALLELISM = {
    "layer_*-model_*states.pt": "pipeline stages",
    "*expert_*_states.pt": "experts spread over ranks",
}


class _Plain:
    """Stands in for a class of DeepSpeed, for its attributes alone."""


STAND_INS: tuple[tuple[Any, str], ...] = (
    (_Plain, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Plain, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Plain, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
)


def recognise(path: Path) -> str | None:
    """Recognise a folder by DeepSpeed's files in it, or in the tag that `latest` names."""
    if not path.is_dir():
        return None
    return next((f.name for folder in (_tag(path), path) for f in folder.glob("*_model_states.pt")), None)


def read(path: Path, options: Options) -> Model:
    """Join the ranks' shares to whole tensors (masters in fp32), in our names or those of the paper's code.

    The settings are in a recipe.yaml (config.json for the paper's code) in the folder, its tag or the folder
    above, or in `--recipe`.
    """
    tag = _tag(path)
    tensors, notes = read_tensors(tag)
    form: Any = paper_folder if paper_folder.MARK in tensors else model_folder
    near = (tag, tag.parent, tag.parent.parent)
    place = next((folder for folder in near if (folder / form.SETTINGS).is_file()), tag)
    model: Model = form.of_tensors(tensors, place, options)
    model.place, model.notes = tag, [*model.notes, f"weights of {tag.name}", *notes]
    return model


def read_tensors(tag: Path) -> tuple[Tensors, list[str]]:
    """List the tensors of a tag, and notes for the report."""
    models, shares = _load(tag)
    try:
        return _whole_tensors(tag, models, shares)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ConvertError(
            f"{tag} is not laid out as deepspeed 0.19 does ({type(error).__name__}: {error})"
        ) from error


def _whole_tensors(tag: Path, models: list[Any], shares: list[Any]) -> tuple[Tensors, list[str]]:
    stage = int(shares[0].get("zero_stage", 0)) if shares else 0
    _refuse_incomplete(tag, models, shares, stage)
    first = models[0]
    buffers = first.get("buffer_names") or []
    whole = {name: tensor for name, tensor in first["module"].items() if stage < 3 or name in buffers}
    tensors = {name: LazyTensor.of(tensor) for name, tensor in whole.items()}
    masters = dict(_masters(tag, first, shares, stage))
    for name, master in masters.items():
        tensors[name] = _checked(tag, name, master, whole.get(name))
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        if stage == 3:
            parts = [model["frozen_param_fragments"][name] for model in models]
            tensors[name] = _joined(parts, shape)
    shared = first.get("shared_params") or {}
    frozen = sorted(tensors.keys() - masters.keys() - set(buffers) - shared.keys()) if shares else []
    for alias, name in shared.items():
        tensors.setdefault(alias, tensors[name])
    how = f"ZeRO stage {stage} of {len(shares)} processes" if shares else "without ZeRO"
    notes = [f"written by DeepSpeed {first.get('ds_version', '?')}, {how}"]
    if frozen:
        notes.append(f"frozen in training: {short_list(frozen)}")
    if {"fp32_groups", "fp32_groups_flat"} & (first.get("optimizer") or {}).keys():
        notes.append(
            "fp32 masters that have no names there (stage 0) are left out: weights as the module has them"
        )
    return unwrapped(tensors), notes


def _tag(path: Path) -> Path:
    """Find the folder with the states: the tag that `latest` names, or the path itself."""
    latest = path / LATEST
    if latest.is_file():
        name = latest.read_text(encoding="utf-8", errors="replace").strip("\n\0 ")
        if re.fullmatch(r"[\w.-]+", name) and (path / name).is_dir():
            return path / name
    return path


def _load(tag: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Load the model states and the optimizer states of all ranks, in rank order."""
    for pattern, words in OTHER_PARALLELISM.items():
        if next(tag.glob(pattern), None):
            raise NotSupported(f"{tag}: checkpoints with {words} are not supported")
    found: dict[str, dict[int, Any]] = {"model": {}, "optim": {}}
    for path in sorted(tag.glob("*_states.pt")):
        if match := STATES.fullmatch(path.name):
            if int(match[2]):
                raise NotSupported(f"{path}: checkpoints of tensor parallelism are not supported")
            table = load_torch(path, STAND_INS)
            if not isinstance(table, dict):
                raise ConvertError(f"{path} holds no table of states but {type(table).__name__}")
            found[match[3]][int(match[1] or 0)] = table
    for kind, ranks in found.items():
        if missing := sorted(set(range(max(ranks, default=-1) + 1)) - ranks.keys()):
            raise ConvertError(f"{tag}: the {kind}_states file of rank {missing[0]} is missing")
    models = [found["model"][rank] for rank in sorted(found["model"])]
    if not models:
        raise ConvertError(f"{tag} holds no file *mp_rank_00_model_states.pt")
    shares = [found["optim"][rank].get("optimizer_state_dict", {}) for rank in sorted(found["optim"])]
    return models, shares


def _refuse_incomplete(tag: Path, models: list[Any], shares: list[Any], stage: int) -> None:
    first = models[0]
    if not isinstance(first.get("module"), dict):
        raise ConvertError(f"{tag}: the model states hold no module")
    if shares and "param_shapes" not in first:
        raise ConvertError(f"{tag}: the model states do not say the shapes of the parameters")
    partitions = shares[0].get("partition_count", len(shares)) if shares else first.get("dp_world_size", 1)
    partitions = max(partitions) if isinstance(partitions, list | tuple) else partitions
    zero = bool(first.get("param_shapes")) and first.get("optimizer") is None
    if (shares and partitions != len(shares)) or (not shares and zero):
        raise ConvertError(
            f"{tag}: files *_optim_states.pt of {len(shares)} processes, written by {partitions}"
        )
    if stage == 3 and len(models) != len(shares):
        raise ConvertError(
            f"{tag}: model states of {len(models)} processes, optimizer states of {len(shares)}"
        )
    if any("ds_zero_partition_groups" in share for share in shares):
        raise NotSupported(f"{tag}: parameters partitioned over some of the processes are not supported")


def _masters(tag: Path, first: Any, shares: Sequence[Any], stage: int) -> Iterator[tuple[str, LazyTensor]]:
    """List the fp32 masters with their names, whole."""
    shapes = [dict(group) for group in first.get("param_shapes") or []] if shares else []
    if stage == 3:
        flats = [share["fp32_flat_groups"] for share in shares]
        offset = 0
        for name, shape in (item for group in shapes for item in group.items()):
            size = -(-math.prod(shape) // len(shares))
            yield name, _joined([part for flat in flats for part in _cut(flat, offset, size)], shape)
            offset += size
        if any(offset != sum(part.numel() for part in flat) for flat in flats):
            raise ConvertError(
                f"{tag}: the masters do not have the {offset} elements of the parameters' shapes"
            )
        return
    for number, group in enumerate(shapes):
        flats = [share["single_partition_of_fp32_groups"][number] for share in shares]
        for name, shape in group.items():
            parts = []
            for flat, share in zip(flats, shares, strict=True):
                if (fragment := share["param_slice_mappings"][number].get(name)) is not None:
                    parts.append(flat.narrow(0, fragment.start, fragment.numel))
            if sum(part.numel() for part in parts) != math.prod(shape):
                raise ConvertError(f"{tag}: the masters of {name} do not have the elements of {tuple(shape)}")
            yield name, _joined(parts, shape)


def _cut(flat: Sequence[Tensor], start: int, size: int) -> list[Tensor]:
    """Cut elements out of tensors that follow one another."""
    parts = []
    for tensor in flat:
        low, high = max(0, start), min(tensor.numel(), start + size)
        if low < high:
            parts.append(tensor[low:high])
        start -= tensor.numel()
    return parts


def _joined(parts: Sequence[Tensor], shape: Sequence[int]) -> LazyTensor:
    """Join flat parts to one tensor when it is read; what is beyond its elements is padding."""
    size = math.prod(shape)
    return LazyTensor(
        tuple(shape), parts[0].dtype, lambda: torch.cat(list(parts)).detach()[:size].view(tuple(shape))
    )


def _checked(tag: Path, name: str, master: LazyTensor, computed: Tensor | None) -> LazyTensor:
    """Compare a master with the weight that the module computes with, when it is read."""

    def read() -> Tensor:
        found = master.read()
        if computed is not None and not same_bits(found.to(computed.dtype), computed):
            raise ConvertError(f"{tag}: the fp32 master of {name} is not the weight that the module has")
        return found

    return LazyTensor(master.shape, master.dtype, read)


FORMAT = Format("a checkpoint folder of DeepSpeed", recognise, read)
