"""Our own models: run directories, one checkpoint of a run, and model folders.

A model folder is what `hybrid convert` writes, and `hybrid generate` and `train.init_from` read:

    recipe.yaml           the model section of a recipe
    model.safetensors     the weights, or model-00001-of-00003.safetensors ... with an index
    tokenizer.model       the tokenizer, where the source had one
    conversion.json       what it was made from, and how
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybrid import recipe as recipes
from hybrid.checkpoint.folder import TRAINER
from hybrid.checkpoint.run import CHECKPOINTS, RECIPE, TOKENIZER, check_tokenizer, newest_weights
from hybrid.checkpoint.tensor_files import weight_files
from hybrid.files import write_text

from . import ConvertError
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
    if (path / RECIPE).is_file() and (weight_files(path) or (path / CHECKPOINTS).is_dir()):
        return RECIPE
    return TRAINER if (path / TRAINER).is_file() and (path.parent.parent / RECIPE).is_file() else None


def read(path: Path, options: Options) -> Model:
    """Read the newest weights of a run directory, or those of a checkpoint, model folder or file."""
    if path.is_file():
        tensors, notes = read_state_dict(path)
        model = of_tensors(tensors, path.parent, options)
    else:
        run, weights = path if (path / RECIPE).is_file() else path.parent.parent, newest_weights(path)
        model = of_tensors(read_safetensors(weight_files(weights)), run, options)
        if model.tokenizer:
            check_tokenizer(run, weights)
        model.place, notes = weights, [f"weights of {weights.name}"] if weights != path else []
    model.notes += notes
    return model


def of_tensors(tensors: Tensors, folder: Path, options: Options) -> Model:
    """Take tensors in our names for the model of `--recipe`, or of the recipe.yaml in a folder."""
    if options.settings:
        raise ConvertError(
            f"{next(iter(options.settings))}=...: only model.* keys can be set for this source"
        )
    found = options.recipe or folder / RECIPE
    if options.recipe is None and not (folder / RECIPE).is_file():
        raise ConvertError(
            f"{folder}: no {RECIPE} there says how the model is built: give --recipe with the recipe that it "
            "was trained with"
        )
    section = recipes.load(found, saved=True, model_only=True).model
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
