"""Our own models: run directories, one checkpoint of a run, and model folders.

A model folder is what `hybrid convert` writes, and `hybrid generate` and `train.init_from` read:

    recipe.yaml           the model section of a recipe
    model.safetensors     the weights, or model-00001-of-00003.safetensors ... with an index
    tokenizer.model       the tokenizer, where the source had one
    conversion.json       what it was made from, and how
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from hybrid import recipe as recipes
from hybrid.checkpoint.folder import TAG, TRAINER, tags_in
from hybrid.checkpoint.run import (
    CHECKPOINTS,
    CONVERSION,
    RECIPE,
    TOKENIZER,
    check_tokenizer,
    conversion_record,
    newest_weights,
    recorded_recipe,
)
from hybrid.checkpoint.tensor_files import weight_files
from hybrid.errors import ConvertError
from hybrid.files import write_text
from hybrid.recipe.schema import Recipe

from .common import Format, Model, Options, Tensors, fit
from .tensor_io import is_weights, read_safetensors, read_state_dict

SETTINGS = RECIPE
MARKS = ("embedding.weight", "blocks.0.norm_mixer.weight")
"""Tensors that every model of ours has."""


def recognise(path: Path) -> str | None:
    """Recognise a run directory or model folder by its recipe, a checkpoint of a run by its record, a file by
    its tensors' names."""
    if is_weights(path):
        return f"tensor {MARKS[0]}" if read_state_dict(path)[0].keys() >= set(MARKS) else None
    if not path.is_dir():
        return None
    if tags_in(path / CHECKPOINTS):
        return CHECKPOINTS
    marks = [name for name in (TRAINER, RECIPE) if (path / name).is_file() and weight_files(path)]
    return CONVERSION if conversion_record(path) else next(iter(marks), None)


def read(path: Path, options: Options) -> Model:
    """Read the newest weights of a run directory, or those of a checkpoint, model folder or file."""
    if path.is_file():
        tensors, notes = read_state_dict(path)
        model = of_tensors(tensors, path.parent, options)
        model.notes += notes
        return model
    weights = newest_weights(path)
    run = path.parent.parent if not (path / TOKENIZER).is_file() and TAG.fullmatch(path.name) else path
    model = of_tensors(read_safetensors(weight_files(weights)), run, options, recorded_recipe(weights))
    if TOKENIZER in model.tokenizer:
        fingerprint = hashlib.sha256(model.tokenizer[TOKENIZER]).hexdigest()
        check_tokenizer(weights, fingerprint, run / TOKENIZER)
    if weights != path:
        model.place, model.notes = weights, [f"weights of {weights.name}"]
    return model


def of_tensors(tensors: Tensors, folder: Path, options: Options, recorded: Recipe | None = None) -> Model:
    """Take tensors in our names for the model of the recipe recorded with them, of `--recipe`, or of the
    recipe.yaml in a folder."""
    if options.settings:
        raise ConvertError(
            f"{next(iter(options.settings))}=...: only model.* keys can be set for this source"
        )
    if recorded is None and options.recipe is None and not (folder / RECIPE).is_file():
        raise ConvertError(
            f"{folder}: no {RECIPE} there says how the model is built: give --recipe with the recipe that it "
            "was trained with"
        )
    recipe = recorded or recipes.load(options.recipe or folder / RECIPE, saved=True, model_only=True)
    section = recipe.model
    if section.vocab_size is None and "embedding.weight" in tensors:
        section.vocab_size = tensors["embedding.weight"].shape[0]
    model = fit(tensors, section, folder)
    if (folder / TOKENIZER).is_file():
        model.tokenizer[TOKENIZER] = (folder / TOKENIZER).read_bytes()
    return model


def write(model: Model, folder: Path, write_shards: Callable[[Path, Tensors], None]) -> None:
    """Write a model folder."""
    write_text(folder / RECIPE, recipes.to_yaml({"model": model.section}))
    write_shards(folder, model.tensors)
    for name, content in model.tokenizer.items():
        (folder / name).write_bytes(content)


FORMAT = Format("a run directory or model folder of this project", recognise, read, write)
