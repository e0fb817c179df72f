"""A run directory, read from outside.

RUN/
  recipe.yaml         the resolved recipe; training from it alone repeats the run
  environment.json    versions and kind of machine
  tokenizer.model     a copy of the data's
  metrics.jsonl       every logged value (hybrid.train.monitor.read_metrics)
  tensorboard/        the same for TensorBoard
  checkpoints/        step_00000100/ ... (hybrid.train.tags)
  samples.txt         continuations of train.prompts by the trained model
  logs/               messages of DeepSpeed and torch, one file a process
  lock                held while a process trains here
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.errors import TrainError

from .tag import load_weights, newest_weights, tokenizer_of

TOKENIZER = "tokenizer.model"

if TYPE_CHECKING:
    from hybrid.data.tokenizer import Tokenizer
    from hybrid.model import HybridLM
    from hybrid.recipe.schema import Recipe


def load_run(path: str | os.PathLike[str]) -> tuple[HybridLM, Tokenizer, Recipe]:
    """The model (fp32, on the CPU, newest weights), tokenizer and recipe of a run directory.

    Raises TrainError when the folder is no run, holds no whole checkpoint, or has another tokenizer than that
    which the weights were trained with.
    """
    from hybrid import recipe as recipes
    from hybrid.data.tokenizer import Tokenizer
    from hybrid.model import HybridLM

    run = Path(path)
    if not (run / "recipe.yaml").is_file():
        raise TrainError(f"{run} is no run directory: it has no recipe.yaml")
    recipe = recipes.load(run / "recipe.yaml")
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
        raise TrainError(f"{weights} does not fit {run / 'recipe.yaml'}: {error}") from error
    return model, tokenizer, recipe
