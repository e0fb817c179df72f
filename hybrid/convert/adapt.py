"""Change a model's settings on the way: what has a place in the changed model is kept, the rest is new."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import ConvertError
from hybrid.recipe.schema import ModelSection

from .common import LazyTensor, Model, complete, meta_model


def adapt(model: Model, overrides: Sequence[str]) -> Model:
    """Apply `model.key=value` texts; tensors of unchanged name and shape are kept.

    What is new in a layer is initialised as training would, always alike; what is new elsewhere (embedding,
    norms, head) is refused, but for a head that is no longer tied. New letters of the pattern take the
    options that all layers of the source agree on, where their kind has them.
    """
    if not overrides:
        return model
    before = model.section
    open_section = dataclasses.replace(before, expanded=None, depth=None, defaults=_common_options(before))
    section = complete(open_section, overrides)
    adapted = dataclasses.replace(
        model, section=section, tensors={}, created=dict(model.created), dropped=dict(model.dropped)
    )
    initial = lru_cache(maxsize=1)(lambda block: _initial_block(section, block))
    for name, tensor in meta_model(section).state_dict().items():
        shape, found = tuple(tensor.shape), model.tensors.get(name)
        if found is not None and found.shape == shape:
            adapted.tensors[name] = found
            continue
        block = re.match(r"blocks\.(\d+)\.", name)
        if name == "head.weight" and found is None:
            adapted.tensors[name] = model.tensors["embedding.weight"]
            adapted.created[name] = "a copy of embedding.weight, to which it was tied"
        elif block is None:
            there = f"is {found.shape} in the source" if found else "is not in the source"
            raise ConvertError(
                f"{name} {there}, and {shape} with {' '.join(overrides)}: it cannot be made up"
            )
        else:
            read = _reader(initial, int(block[1]), name)
            adapted.tensors[name] = LazyTensor(shape, torch.float32, read)
            adapted.created[name] = f"initialised, {shape}" + (
                f"; {found.shape} in the source" if found else ""
            )
    for name in model.tensors:
        if name not in adapted.tensors or name in adapted.created:
            adapted.dropped[model.source_names.get(name, name)] = "no place in the changed model"
    return adapted


def _common_options(section: ModelSection) -> dict[str, Any]:
    """Collect the options that have one value in all layers."""
    entries = list(section.layers.values())
    first = {name: value for name, value in entries[0].items() if name != "kind"}
    return {
        name: value for name, value in first.items() if all(entry.get(name) == value for entry in entries)
    }


def _reader(initial: Any, block: int, name: str) -> Any:
    return lambda: initial(block)[name]


def _initial_block(section: ModelSection, index: int) -> dict[str, Tensor]:
    """Initialise one block of a model, from a seed of its own."""
    model = meta_model(section)
    block: Any = model.blocks[index].to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(index)
        block.reset_parameters()
    return {f"blocks.{index}.{name}": tensor for name, tensor in block.state_dict().items()}
