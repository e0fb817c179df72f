"""Estimates of the bytes a process needs, by use and ZeRO stage; measured cases check them in the tests."""

from __future__ import annotations

from typing import NamedTuple

from hybrid.model import HybridLM
from hybrid.model.block import ffn_width
from hybrid.recipe import Geometry, Recipe

LARGEST_BUCKET = 200_000_000
"""Gradient elements that DeepSpeed reduces at once."""
LARGEST_GATHERED = 1_000_000_000
"""Elements of other ranks' weights that ZeRO-3 keeps for the backward pass (DeepSpeed's default)."""


class Memory(NamedTuple):
    """Estimated bytes per process."""

    weights: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return sum(self)


def element_size(recipe: Recipe) -> int:
    """Return the bytes of a weight, an activation or a number sent."""
    return 2 if recipe.train.precision == "bf16" else 4


def memory_estimate(model: HybridLM, recipe: Recipe, geometry: Geometry, stage: int) -> Memory:
    """Estimate bytes per process at a ZeRO stage, at the worst moment of a step and without fragmentation.

    - weights: ZeRO-3 shares them out. optimizer: AdamW's two moments, and from stage 1 on fp32 masters.
    - gradients: in fp32, from stage 1 on shared out; whole at stage 1 in bf16, and while micro-batches are
      accumulated there.
      Both are of what is trained (`train.only`).
    - buffers: the bucket in which gradients are reduced; at stage 3 also the gathered weights.
    - activations: see `_activations`. logits: fp32 of one chunk of the loss, and their gradient.
    """
    parameters, element, ranks = model.num_parameters, element_size(recipe), geometry.world_size
    trained = model.num_trained
    moments = 8 if recipe.optimizer.name == "adamw" else 0
    passes = geometry.accumulation * recipe.train.tbptt_chunks
    whole = stage == 0 or (stage == 1 and (passes > 1 or element == 2))
    buffers = element * min(trained, LARGEST_BUCKET) if ranks > 1 else 0
    if stage == 3:
        buffers += element * min(parameters, LARGEST_GATHERED)
    at_once = -(-recipe.data.context // (recipe.parallel.sequence * recipe.train.tbptt_chunks))
    tokens = geometry.micro_batch * at_once
    return Memory(
        weights=element * parameters / (ranks if stage == 3 else 1),
        gradients=4 * trained / (1 if whole else ranks),
        optimizer=(moments + 4) * trained / ranks if stage >= 1 else moments * trained,
        buffers=buffers,
        activations=element * tokens * _activations(model, recipe),
        logits=2 * 4 * min(tokens, recipe.train.loss_chunk) * model.embedding.num_embeddings,
    )


def _activations(model: HybridLM, recipe: Recipe) -> float:
    """Estimate the elements that a token keeps for the backward pass, roughly.

    A block keeps its mixer's vectors of the hidden size (`Mixer.kept_vectors`, which counts the block's
    norms) and the feed-forward's of its width. With activation checkpointing one block at a time keeps them,
    and the others their input.
    """
    hidden = recipe.model.hidden_size
    inside = (4 if recipe.model.feed_forward == "swiglu" else 2) * ffn_width(recipe.model)
    kept = [mixer.kept_vectors * hidden + inside for mixer in model.mixers]
    if recipe.train.activation_checkpointing:
        return len(kept) * hidden + max(kept)
    return sum(kept)
