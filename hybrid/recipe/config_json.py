"""A model section in the `config.json` of a Hugging Face folder; needs nothing of transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.errors import UserError

from .schema import ModelSection
from .typed import from_saved

CONFIG = "config.json"
MODEL_TYPE = "kvm_hybrid"

COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "depth",
    "tie_word_embeddings": "tie_embeddings",
}
"""Keys that all of transformers knows -> keys of the model section that say the same."""


class ConfigError(UserError):
    """A config.json that does not describe a model of ours; the message names the file and the key."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json; empty where there is none. ConfigError where it is no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not a table of keys")
    return found


def config_of(section: ModelSection) -> dict[str, Any]:
    """Write a complete model section as keys of `config.json`."""
    model = json.loads(json.dumps(dataclasses.asdict(section)))
    return {key: model[name] for key, name in COMMON.items()} | {"model": model}


def section_of(config: Mapping[str, Any], place: Any = CONFIG) -> ModelSection:
    """Read and check the model section in a config.

    Raises RecipeError for mistakes in it, ConfigError where there is none or a common key says otherwise.
    """
    model = config.get("model")
    if not isinstance(model, dict):
        raise ConfigError(f"{place}: no table 'model' says how the model is built")
    section = from_saved({"model": model}, str(place), model_only=True).model
    for key, name in COMMON.items():
        if config.get(key) is not None and config[key] != getattr(section, name):
            found = f"{key} is {config[key]}, model.{name} {getattr(section, name)}"
            raise ConfigError(f"{place}: {found}: correct one of them")
    return section
