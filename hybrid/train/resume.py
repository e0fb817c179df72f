"""What may change between a checkpoint and the run that goes on from it, and starting from weights alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.checkpoint.folder import Origin
from hybrid.checkpoint.run import load_weights, newest_weights, tokenizer_of
from hybrid.errors import TrainError
from hybrid.recipe.schema import Recipe, renamed

FIXED = {
    "model": None,
    "data": ("context", "boundaries", "order"),
    "optimizer": ("name", "mup_base_size"),
    "train": ("batch_size", "tbptt_chunks", "seed", "precision", "z_loss", "only", "distill"),
}
"""Keys that make it another run (None: the whole section)."""
SHOWN = ("optimizer", "schedule", "parallel")
"""Sections whose other keys may change, which is said on the terminal; of the rest only train.steps changes
what is learned, as the schedule goes by it. The number of processes may change too: checkpoints do not depend
on it."""
NO_FINGERPRINT = (
    "data: the checkpoint, of an earlier version, does not say what it was trained on; taken to be this, "
    "which later checkpoints keep"
)


def check(origin: Origin, now: Origin) -> list[str]:
    """Compare a checkpoint's origin with what is to go on from it; returns the changes to show.

    Raises TrainError naming everything that must not change.
    """
    folder, accepted = now.recipe["data"]["folder"], now.recipe["train"]["accept_new_data"]
    if origin.tokenizer != now.tokenizer:
        raise TrainError(
            f"the checkpoint's tokenizer has fingerprint {origin.tokenizer[:12]}, that of {folder} "
            f"{now.tokenizer[:12]}: the data was prepared anew with another one"
        )
    changes = dict(_changes(renamed(origin.recipe), now.recipe))
    refused = [text for key, text in changes.items() if _fixed(key)]
    if refused:
        raise TrainError(
            "the recipe differs from the checkpoint's in what cannot change on the way: " + "; ".join(refused)
            + ". Give another train.output, with train.init_from to start from its weights"
        )  # fmt: skip
    data = list(_data_changes(origin.data, now.data)) if origin.data else _source_changes(changes)
    if data and not accepted:
        raise TrainError(
            f"the data in {folder} differs from what the checkpoint was trained on: " + "; ".join(data)
            + ". Give the data it was trained on, another train.output (with train.init_from to start from "
            "its weights), or train.accept_new_data=true to go on with this"
        )  # fmt: skip
    told = (("train", "steps"), ("train", "teacher"))
    shown = [text for key, text in changes.items() if key[0] in SHOWN or key[:2] in told]
    if origin.world_size != now.world_size:
        shown.append(f"processes: {origin.world_size} -> {now.world_size}")
    return shown + data + ([] if origin.data else [NO_FINGERPRINT])


def _source_changes(changes: dict[tuple[str, ...], str]) -> list[str]:
    """Choose the changes of what the recipe says of its sources, but for where they lie."""
    return [text for key, text in changes.items() if key[:2] == ("data", "sources") and key[-1] != "paths"]


def _data_changes(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Say how the sources (`Store.describe`) differ."""
    if list(before) != list(now):
        yield f"the sources, in order: {', '.join(before)} -> {', '.join(now)}"
    for name in (name for name in before if name in now):
        was, found = before[name], now[name]
        if was["fingerprint"] != found["fingerprint"]:
            yield f"source {name!r} holds other text: {_holding(was)} -> {_holding(found)}"
        elif was["held_out_fingerprint"] != found["held_out_fingerprint"]:
            key, counts = f"data.sources.{name}.validation", f"{was['held_out']:,} -> {found['held_out']:,}"
            yield f"source {name!r} has other held-out documents ({key}): {counts}"
        if was["weight"] != found["weight"]:
            yield f"data.sources.{name}.weight: {was['weight']:g} -> {found['weight']:g}"


def _holding(source: dict[str, Any]) -> str:
    return (
        f"{source['documents']:,} documents ({source['held_out']:,} held out), {source['tokens']:,} tokens, "
        f"fingerprint {source['fingerprint'][:12]}"
    )


def plain(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to what JSON gives back."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


def load_initial(model: nn.Module, path: str, tokenizer: str) -> str:
    """Copy the weights at `path` into `model`; returns a line that says what was copied.

    Args:
        path: a run directory, or a folder with model.safetensors.
        tokenizer: the fingerprint of this run's; a run directory must have the same.

    Raises TrainError listing every missing, unexpected and differently shaped tensor.
    """
    source = newest_weights(path)
    refuse_other_tokenizer("train.init_from", source, tokenizer)
    found = load_weights(source)
    wanted = model.state_dict()
    faults = [f"missing: {name}" for name in wanted.keys() - found.keys()]
    faults += [f"not in this model: {name}" for name in found.keys() - wanted.keys()]
    faults += [
        f"{name} is {_shape(found[name])} there and {_shape(wanted[name])} here"
        for name in wanted.keys() & found.keys()
        if found[name].shape != wanted[name].shape
    ]
    if faults:
        listed = "".join(f"\n  - {fault}" for fault in sorted(faults))
        raise TrainError(f"train.init_from={path}: the weights do not fit this recipe's model:{listed}")
    with torch.no_grad():
        model.load_state_dict(found)
    return f"weights from {source}: {len(found)} tensors copied, none missing, none reshaped"


def refuse_other_tokenizer(key: str, source: Path, tokenizer: str) -> None:
    """Raise TrainError where the weights in `source` are known to be of another tokenizer than this run's."""
    other = tokenizer_of(source)
    if other not in (None, tokenizer):
        raise TrainError(
            f"{key}: the weights in {source} were trained with another tokenizer "
            f"(fingerprint {other[:12]}, this data's is {tokenizer[:12]}): set data.tokenizer to that one"
        )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def _changes(before: Any, after: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """List changes leaf by leaf as `key, "section.key: old -> new"`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from _changes(before.get(name), after.get(name), (*key, name))
    elif before != after and (before, after) != (None, {}):  # a table that earlier versions did not have
        yield key, f"{'.'.join(key)}: {before!r} -> {after!r}"


def _fixed(key: tuple[str, ...]) -> bool:
    if key[0] not in FIXED:
        return False
    names = FIXED[key[0]]
    return names is None or key[1] in names
