"""What may change between a checkpoint and the run that goes on from it, and starting from weights alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.checkpoint.folder import Origin
from hybrid.checkpoint.run import load_weights, newest_weights, tokenizer_of
from hybrid.errors import TrainError
from hybrid.recipe.schema import Recipe, renamed

FIXED = {
    "model": None,
    "data": ("sources", "context", "boundaries", "order"),
    "optimizer": ("name", "mup_base_size"),
    "train": ("batch_size", "tbptt_chunks", "seed", "precision", "z_loss"),
}
"""Keys that make it another run (None: the whole section)."""
SHOWN = ("optimizer", "schedule", "parallel")
"""Sections whose other keys may change, which is said on the terminal; of the rest only train.steps changes
what is learned, as the schedule goes by it. The number of processes may change too: checkpoints do not depend
on it."""
PLACES = ("paths", "name")
"""Where a source lies is free: the tokenizer and the prepared shards say what it holds."""


def check(origin: Origin, recipe: Recipe, tokenizer: str, world_size: int) -> list[str]:
    """Compare a checkpoint's origin with what is to go on from it; returns the changes to show.

    Raises TrainError naming every key that must not change.
    """
    if origin.tokenizer != tokenizer:
        raise TrainError(
            f"the checkpoint's tokenizer has fingerprint {origin.tokenizer[:12]}, that of "
            f"{recipe.data.folder} {tokenizer[:12]}: the data was prepared anew with another one"
        )
    changes = dict(_changes(renamed(origin.recipe), plain(recipe)))
    refused = [text for key, text in changes.items() if _fixed(key)]
    if refused:
        raise TrainError(
            "the recipe differs from the checkpoint's in what cannot change on the way: " + "; ".join(refused)
            + ". Give another train.output, with train.init_from to start from its weights"
        )  # fmt: skip
    shown = [text for key, text in changes.items() if key[0] in SHOWN or key[:2] == ("train", "steps")]
    if origin.world_size != world_size:
        shown.append(f"processes: {origin.world_size} -> {world_size}")
    return shown


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
    other = tokenizer_of(source)
    if other not in (None, tokenizer):
        raise TrainError(
            f"train.init_from: the weights in {source} were trained with another tokenizer "
            f"(fingerprint {other[:12]}, this data's is {tokenizer[:12]}): set data.tokenizer to that one"
        )
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


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def _changes(before: Any, after: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """List changes leaf by leaf as `key, "section.key: old -> new"`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            yield from _changes(before.get(name), after.get(name), (*key, name))
    elif before != after:
        yield key, f"{'.'.join(key)}: {before!r} -> {after!r}"


def _fixed(key: tuple[str, ...]) -> bool:
    if key[0] not in FIXED or (key[-1] in PLACES and key[:2] == ("data", "sources")):
        return False
    names = FIXED[key[0]]
    return names is None or key[1] in names
