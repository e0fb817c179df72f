"""A model section as `config.json` and back; needs nothing of transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hybrid.convert import ConvertError
from hybrid.recipe.schema import ModelSection

MODEL_TYPE = "kvm_hybrid"
ARCHITECTURE = "HybridForCausalLM"

COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "depth",
    "tie_word_embeddings": "tie_embeddings",
}
"""Keys that all of transformers knows -> keys of the model section that say the same."""


def config_of(section: ModelSection) -> dict[str, Any]:
    """Write a complete model section as keys of `config.json`."""
    model = json.loads(json.dumps(dataclasses.asdict(section)))
    return {key: model[name] for key, name in COMMON.items()} | {"model": model}


def section_of(config: Mapping[str, Any], place: Any) -> ModelSection:
    """Read the model section in a config, every key of it known.

    Raises ConvertError for a config without one, for unknown keys, and where a common key says otherwise.
    """
    model = config.get("model")
    if not isinstance(model, dict):
        raise ConvertError(f"{place}: no table 'model' says how the model is built")
    known = {field.name for field in dataclasses.fields(ModelSection)}
    if unknown := sorted(model.keys() - known):
        raise ConvertError(f"{place}: model.{unknown[0]} is unknown here; known: {', '.join(sorted(known))}")
    section = ModelSection(**model)
    for key, name in COMMON.items():
        if config.get(key) is not None and config[key] != getattr(section, name):
            found = f"{key} is {config[key]}, model.{name} {getattr(section, name)}"
            raise ConvertError(f"{place}: {found}: correct one of them")
    return section
