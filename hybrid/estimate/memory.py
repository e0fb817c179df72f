"""How many bytes a process of a run needs, by part and ZeRO stage; measured cases check it in the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from hybrid.recipe import Geometry
from hybrid.recipe.schema import Recipe

if TYPE_CHECKING:
    from hybrid.model import HybridLM
    from hybrid.model.block import Block

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


def memory_estimate(model: HybridLM, recipe: Recipe, geometry: Geometry, stage: int) -> Memory:
    """Bytes per process at a ZeRO stage, at the worst moment of a step and without fragmentation.

    - weights: ZeRO-3 shares them out. optimizer: AdamW's two moments, and from stage 1 on fp32 masters.
    - gradients: in fp32, from stage 1 on shared out; whole at stage 1 in bf16, and while micro-batches are
      accumulated there.
    - buffers: the bucket in which gradients are reduced; at stage 3 also the gathered weights.
    - activations: see `_activations`. logits: fp32 of one chunk of the loss, and their gradient.
    """
    parameters = sum(model.parameter_parts().values())
    element = 2 if recipe.train.precision == "bf16" else 4
    ranks = geometry.world_size
    moments = 8 if recipe.optimizer.name == "adamw" else 0
    passes = geometry.accumulation * recipe.train.tbptt_chunks
    whole = stage == 0 or (stage == 1 and (passes > 1 or element == 2))
    buffers = element * min(parameters, LARGEST_BUCKET) if ranks > 1 else 0
    if stage == 3:
        buffers += element * min(parameters, LARGEST_GATHERED)
    pieces = recipe.parallel.sequence * recipe.train.tbptt_chunks
    tokens = geometry.micro_batch * -(-recipe.data.context // pieces)
    return Memory(
        weights=element * parameters / (ranks if stage == 3 else 1),
        gradients=4 * parameters / (1 if whole else ranks),
        optimizer=(moments + 4) * parameters / ranks if stage >= 1 else moments * parameters,
        buffers=buffers,
        activations=element * tokens * _activations(model, recipe),
        logits=2 * 4 * min(tokens, recipe.train.loss_chunk) * model.embedding.num_embeddings,
    )


def _activations(model: HybridLM, recipe: Recipe) -> float:
    """Elements that a token keeps for the backward pass, roughly.

    A block keeps its mixer's vectors of the hidden size (`Mixer.kept_vectors`, which counts the block's
    norms) and the feed-forward's of its width. With activation checkpointing one block at a time keeps them,
    and the others their input.
    """
    from hybrid.model.block import ffn_width  # imports torch

    hidden = recipe.model.hidden_size
    inside = (4 if recipe.model.feed_forward == "swiglu" else 2) * ffn_width(recipe.model)
    kept = [block.mixer.kept_vectors * hidden + inside for block in cast("list[Block]", list(model.blocks))]
    if recipe.train.activation_checkpointing:
        return len(kept) * hidden + max(kept)
    return sum(kept)
