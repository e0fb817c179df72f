"""How well the model does: loss and bits per byte on held-out text, and samples at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hybrid.checkpoint.run import load_run
from hybrid.data.validation import ValidationSet
from hybrid.distributed.context_parallel import ALONE
from hybrid.distributed.world import World
from hybrid.errors import TrainError, UserError, words
from hybrid.files import write_text
from hybrid.generate import generate
from hybrid.recipe.schema import Recipe

from . import tbptt

TEMPERATURE = 0.8


class Score(NamedTuple):
    """How well held-out text was predicted."""

    loss: float
    """Nats per counted token."""
    bits_per_byte: float
    """Nats of all counted tokens / (ln 2 * UTF-8 bytes of the scored text)."""
    text: str
    """Fingerprint of the scored text."""


@torch.no_grad()
def score(
    model: nn.Module,
    held_out: ValidationSet,
    world: World,
    tbptt_chunks: int = 1,
    after_batch: Callable[[], None] = lambda: None,
) -> Score:
    """Score the held-out text, every batch read in `tbptt_chunks` chunks; `held_out` gives every rank its own
    batches, equally many, as a partitioned model (ZeRO-3) needs. `after_batch` is called after each."""
    training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for batch in held_out:
        reader = tbptt.ChunkReader(model, world.device)
        for chunk in tbptt.chunks(ALONE.shard(batch), tbptt_chunks):
            loss = reader.read(chunk)
            world.heartbeat.beat("validation")
            unknown = torch.zeros_like(loss.tokens) if loss.outside is None else loss.outside
            sums += torch.stack([loss.total.double(), loss.tokens.double(), unknown.double()])
        after_batch()
    model.train(training)
    nats, counted, outside = world.gather_numbers(sums.tolist()).sum(0).tolist()
    if outside:
        told = f"{outside:.0f} ids of the held-out text are outside the model's vocabulary"
        world.raise_if_any(TrainError(told))
    return Score(
        nats / max(1, counted), nats / math.log(2) / max(1, held_out.bytes), held_out.text_fingerprint
    )


def write_samples(run: Path, recipe: Recipe, device: torch.device, say: Callable[[str], None]) -> list[str]:
    """Continue `train.prompts` with the run's saved weights, whole in this process at any ZeRO stage; returns
    the texts and writes them to samples.txt. What cannot be generated is said."""
    prompts, length = recipe.train.prompts, recipe.train.sample_tokens
    if not prompts or not length:
        return []
    texts: list[str] = []
    try:  # the run is saved and its scores stand, whatever comes of samples
        model, tokenizer, _ = load_run(run)
        model.to(device).eval()
        found = generate(
            model, tokenizer, prompts, max_tokens=length, temperature=TEMPERATURE, seed=recipe.train.seed
        )
        texts = [prompt + one.text for prompt, one in zip(prompts, found, strict=True)]
        write_text(run / "samples.txt", "\n\n----\n\n".join(texts) + "\n")
    except (UserError, OSError) as error:
        say(f"{'samples are not kept' if texts else 'no samples'}: {words(error)}")
    return texts
