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
from hybrid.recipe.config_json import CONFIG, MODEL_TYPE, read_config, section_of
from hybrid.recipe.schema import Recipe

from .folder import MANIFEST, TRAINER, file_fault, read_manifest, read_trainer, tags_in
from .tensor_files import Reader, weight_files

RECIPE, TOKENIZER, CHECKPOINTS = "recipe.yaml", "tokenizer.model", "checkpoints"
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
    folder, or a Hugging Face folder of one.

    Raises TrainError when the folder is no run, holds no whole checkpoint, or has another tokenizer than that
    which the weights were trained with.
    """
    run = Path(path)
    recipe = _recipe(run)
    weights = newest_weights(run)
    tokenizer = Tokenizer.load(run / TOKENIZER)
    trained_with = tokenizer_of(weights)
    if trained_with not in (None, tokenizer.fingerprint):
        raise TrainError(
            f"{weights} was trained with another tokenizer (fingerprint {trained_with[:12]}) than "
            f"{run / TOKENIZER} (fingerprint {tokenizer.fingerprint[:12]})"
        )
    model = HybridLM.from_recipe(recipe)
    try:
        model.load_state_dict(load_weights(weights))
    except RuntimeError as error:
        raise TrainError(f"{weights} does not fit {run / RECIPE}: {error}") from error
    return model, tokenizer, recipe


def _recipe(run: Path) -> Recipe:
    """Read the recipe of a run directory or model folder, or the config.json of a Hugging Face folder."""
    if (run / RECIPE).is_file():
        return recipes.load(run / RECIPE, saved=True, model_only=True)
    config = read_config(run)
    if config.get("model_type") == MODEL_TYPE:
        return Recipe(model=section_of(config, run / CONFIG))
    found = f", and its {CONFIG} is another model's: hybrid convert makes one of ours of it" if config else ""
    raise TrainError(f"{run} is no run directory: it has no {RECIPE}{found}")


def newest_weights(path: str | os.PathLike[str]) -> Path:
    """Find the folder with the newest whole weights of a run directory; itself if it holds weights.

    Damaged ones are passed over, which is said on standard error. TrainError when there are none.
    """
    run = Path(path)
    if weight_files(run):
        return run
    faults: list[str] = []
    for tag in reversed(tags_in(run / CHECKPOINTS)):
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
    weights = [name for name in sums if name.startswith("model") and name.endswith(".safetensors")]
    if not weights:
        return f"{MANIFEST} does not list any weights"
    needed = [TRAINER, *weights]  # the record says with which tokenizer they were trained
    return next(filter(None, (file_fault(tag / name, *sums[name]) for name in needed)), None)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Load the weights in a folder that `newest_weights` found; TrainError when they are damaged."""
    reader = Reader(folder)
    return {name.removeprefix(HF_PREFIX): reader.weight(name) for name in reader.weights}


def tokenizer_of(weights: Path) -> str | None:
    """Read the fingerprint of the tokenizer that a checkpoint's weights were trained with; None for weights
    that lie elsewhere. TrainError when the record of it is damaged."""
    return read_trainer(weights)[1].tokenizer if (weights / TRAINER).is_file() else None
