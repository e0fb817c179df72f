"""A run directory: opened by the run that trains in it, and read from outside.

RUN/
  recipe.yaml         the resolved recipe; training from it alone repeats the run
  environment.json    versions and kind of machine
  tokenizer.model     a copy of the data's
  metrics.jsonl       every logged value (hybrid.train.metrics.read_metrics)
  tensorboard/        the same for TensorBoard
  checkpoints/        step_00000100/ ... (hybrid.checkpoint.folder)
  samples.txt         continuations of train.prompts by the trained model
  logs/               messages of DeepSpeed and torch, one file a process
  lock                held while a process trains here
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid import recipe as recipes
from hybrid.data.tokenizer import Tokenizer
from hybrid.distributed.world import World
from hybrid.errors import TrainError
from hybrid.files import lock, write_json, write_text
from hybrid.model import HybridLM
from hybrid.recipe import RecipeError
from hybrid.recipe.config_json import CONFIG, MODEL_TYPE, read_config, section_of
from hybrid.recipe.schema import Recipe

from .folder import (
    MANIFEST,
    TRAINER,
    file_fault,
    read_manifest,
    read_trainer,
    record_fault,
    tags_in,
)
from .tensor_files import SUFFIX, Reader, weight_files

RECIPE, TOKENIZER, CHECKPOINTS = "recipe.yaml", "tokenizer.model", "checkpoints"
CONVERSION = "conversion.json"
"""What `hybrid convert` writes into a folder beside the model: settings, origin, report."""
HF_PREFIX = "model."
"""What stands before our names of tensors in a Hugging Face folder."""
PACKAGES = ("kvm-hybrid", "torch", "deepspeed", "numpy", "sentencepiece", "grain", "safetensors", "omegaconf")


@contextmanager
def opened(run: Path) -> Iterator[None]:
    """Create a run directory and keep other runs out of it while the block runs.

    Main rank only. TrainError when another process is training there, or the lock is no file to open.
    Where the file system has no locks, that is said on standard error.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / "lock"
    with ExitStack() as stack:
        try:
            missing = stack.enter_context(lock(path, wait=False))
        except BlockingIOError as error:
            raise TrainError(
                f"another process is training in {run}: give this one another train.output"
            ) from error
        except OSError as error:
            raise TrainError(
                f"{path} cannot be opened to lock {run} ({error.strerror}): remove it, or give another "
                "train.output"
            ) from error
        if missing is not None:
            print(
                f"{path} cannot be locked ({missing.strerror}): going on without a lock; see to it that no "
                "other process trains there, or give a train.output on a file system with locks",
                file=sys.stderr,
                flush=True,
            )
        yield


def describe(run: Path, recipe: Recipe, tokenizer: Tokenizer, world: World) -> None:
    """Write the resolved recipe, the tokenizer and the versions it runs with. Main rank only."""
    write_text(run / RECIPE, recipes.to_yaml(recipe))
    write_json(run / "environment.json", environment(world))
    tokenizer.save(run / TOKENIZER)


def environment(world: World) -> dict[str, Any]:
    """Collect versions and the kind of machine, nothing that names this one."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "system": sys.platform,
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device,
        "processes": world.size,
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def load_run(path: str | os.PathLike[str]) -> tuple[HybridLM, Tokenizer, Recipe]:
    """Load the model (fp32, on the CPU, newest weights), tokenizer and recipe of a run directory, a model
    folder, or a Hugging Face folder of ours.

    What lies beside the weights is not trusted: the recipe is that which the checkpoint was written with, and
    where recipe.yaml describes another model, that is said on standard error.

    `path` may also be a folder with the files of one checkpoint and tokenizer.model, or a model folder that
    `hybrid convert` wrote, whose conversion.json has the recipe's model section.

    Raises TrainError when the folder holds no whole checkpoint, or has another tokenizer than that which the
    weights were trained with.
    """
    run = Path(path)
    weights = newest_weights(run)
    recipe = recorded_recipe(weights)
    if recipe is None:
        raise TrainError(
            f"{weights} holds weights without {TRAINER} and {MANIFEST} of a checkpoint, or {CONVERSION} of a "
            "model folder, which say with which recipe and tokenizer they were trained: give the run "
            "directory, put all files of its checkpoint there, or make a model folder with hybrid convert"
        )
    if (run / RECIPE).exists():
        _say_differences(run / RECIPE, recipe)
    tokenizer = Tokenizer.load(run)
    check_tokenizer(weights, tokenizer.fingerprint, run / TOKENIZER)
    return load_model(weights, recipe), tokenizer, recipe


def load_model(weights: Path, recipe: Recipe, *, own_dtype: bool = False) -> HybridLM:
    """Build the model of the recipe recorded with the weights in a folder, and load them on the CPU: in fp32,
    or with `own_dtype` in theirs, where they agree."""
    model, tensors = HybridLM.from_recipe(recipe), load_weights(weights)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    try:
        model.to(dtypes.pop() if own_dtype and len(dtypes) == 1 else torch.float32).load_state_dict(tensors)
    except RuntimeError as error:
        raise TrainError(f"{weights} does not fit the recipe recorded there: {error}") from error
    return model


def recorded_recipe(weights: Path) -> Recipe | None:
    """Read the recipe (of a model folder the model section) that weights were trained with; None for weights
    without a record of it. TrainError or RecipeError when the record is damaged."""
    if (weights / TRAINER).is_file() and (weights / MANIFEST).is_file():
        return recipes.from_saved(read_trainer(weights)[1].recipe, str(weights / TRAINER))
    if (record := conversion_record(weights)) is not None:
        return recipes.from_saved({"model": record["settings"]}, str(weights / CONVERSION), model_only=True)
    config = read_config(weights)
    if config.get("model_type") == MODEL_TYPE:
        return Recipe(model=section_of(config, weights / CONFIG))
    return None


def conversion_record(folder: Path) -> dict[str, Any] | None:
    """Read the record of a model folder that `hybrid convert` wrote; None where there is none, or of a folder
    in another format."""
    try:
        found = json.loads((folder / CONVERSION).read_bytes())
        return found if found["format"] == "hybrid" and isinstance(found["settings"], dict) else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainError(f"{folder / CONVERSION} is damaged ({error})") from None


def check_tokenizer(weights: Path, fingerprint: str, path: Path) -> None:
    """Raise TrainError where weights were trained with another tokenizer than that of the file `path`."""
    trained_with = tokenizer_of(weights)
    if trained_with not in (None, fingerprint):
        raise TrainError(
            f"{weights} was trained with another tokenizer (fingerprint {trained_with[:12]}) than "
            f"{path} (fingerprint {fingerprint[:12]})"
        )


def _say_differences(path: Path, used: Recipe) -> None:
    """Name on standard error what a run's recipe file says of the model otherwise than its checkpoint."""
    try:
        beside = vars(recipes.load(path, saved=True, model_only=True).model)
    except RecipeError as error:
        differing = [f"it cannot be read ({'; '.join(error.problems)})"]
    else:
        pairs = [(key, beside[key], value) for key, value in vars(used.model).items() if beside[key] != value]
        differing = [f"model.{key} is {there!r} there, used is {value!r}" for key, there, value in pairs]
    if differing:
        print(
            f"{path} is not the checkpoint's own recipe, which is used: {'; '.join(differing)}",
            file=sys.stderr,
            flush=True,
        )


def newest_weights(path: str | os.PathLike[str]) -> Path:
    """Find the folder with the newest whole weights of a run directory; itself if it holds weights only.

    Damaged ones are passed over, which is said on standard error. TrainError when there are none.
    """
    run = Path(path)
    tags = tags_in(run / CHECKPOINTS)
    if weight_files(run) and not tags:
        if (run / MANIFEST).exists() and (fault := _weights_fault(run)):
            raise TrainError(f"{run} holds no whole weights: {fault}")
        return run
    faults: list[str] = []
    for tag in reversed(tags):
        folder = run / CHECKPOINTS / tag
        if (fault := _weights_fault(folder)) is None:
            if faults:
                print(f"{run}: {'; '.join(faults)}: taking {tag}", file=sys.stderr, flush=True)
            return folder
        faults.append(f"{tag} is damaged ({fault})")
    found = "; ".join(faults) or f"neither model.safetensors nor a checkpoint below {CHECKPOINTS}/"
    raise TrainError(f"{run} holds no whole weights: {found}")


def _weights_fault(tag: Path) -> str | None:
    sums = read_manifest(tag)
    if isinstance(sums, str):
        return sums
    weights = [name for name in sums if name.startswith("model") and name.endswith(SUFFIX)]
    if not weights:
        return f"{MANIFEST} does not list any weights"
    needed = [TRAINER, *weights]  # the record says with which recipe and tokenizer they were trained
    fault = next(filter(None, (file_fault(tag / name, *sums[name]) for name in needed)), None)
    return fault or record_fault(tag, sums)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Load the weights in a folder that `newest_weights` found; TrainError when they are damaged."""
    reader = Reader(folder)
    found = {name.removeprefix(HF_PREFIX): reader.weight(name) for name in reader.weights}
    if whole := [f"{name} is {found[name].dtype}" for name in found if not found[name].is_floating_point()]:
        raise TrainError(f"{folder}: weights are floating-point numbers, but {whole[0]}")
    return found


def tokenizer_of(weights: Path) -> str | None:
    """Read the fingerprint of the tokenizer that weights of a checkpoint, model folder or Hugging Face
    folder were trained with; None where that is not known. TrainError when the record of it is damaged."""
    if (weights / TRAINER).is_file():
        return read_trainer(weights)[1].tokenizer
    if (record := conversion_record(weights)) is not None:
        return record.get("tokenizer")
    if read_config(weights).get("model_type") == MODEL_TYPE and (weights / TOKENIZER).is_file():
        return hashlib.sha256((weights / TOKENIZER).read_bytes()).hexdigest()
    return None
