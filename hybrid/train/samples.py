"""Continuations of `train.prompts` at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hybrid.checkpoint.run import load_run
from hybrid.recipe.schema import Recipe

TEMPERATURE = 0.8


def write(folder: Path, recipe: Recipe, device: torch.device, say: Callable[[str], None]) -> list[str]:
    """Continue the prompts with the run's saved weights, whole in this process at any ZeRO stage; returns the
    texts and writes them to samples.txt. What cannot be generated is said."""
    prompts, length = recipe.train.prompts, recipe.train.sample_tokens
    if not prompts or not length:
        return []
    from hybrid.generate import GenerateError, generate

    model, tokenizer, _ = load_run(folder)
    model.to(device).eval()
    try:
        found = generate(
            model, tokenizer, prompts, max_tokens=length, temperature=TEMPERATURE, seed=recipe.train.seed
        )
    except GenerateError as error:  # the run is saved and its scores stand, whatever comes of samples
        say(f"no samples: {error}")
        return []
    texts = [prompt + one.text for prompt, one in zip(prompts, found, strict=True)]
    (folder / "samples.txt").write_text("\n\n----\n\n".join(texts) + "\n", encoding="utf-8")
    return texts
