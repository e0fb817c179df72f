"""Estimates of what processes send each other in a step; counted collectives check them in the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybrid.model import HybridLM
from hybrid.recipe import Geometry, Recipe

from .memory import LARGEST_GATHERED, element_size


@dataclass(frozen=True)
class Exchange:
    """A kind of collective over all ranks."""

    what: str
    payload: float
    """Bytes of the whole tensors, over a step."""
    passes: int
    """How often a ring hands every byte round: twice for an all-reduce, once for its two halves."""
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a step, over a ring."""
        return self.passes * self.payload * (self.ranks - 1) / self.ranks


def zero_exchanges(model: HybridLM, recipe: Recipe, geometry: Geometry, stage: int) -> list[Exchange]:
    """List DeepSpeed's collectives of one step at a ZeRO stage (as 0.19 does them: 1 and 2 all-reduce)."""
    ranks, micro_batches = geometry.world_size, geometry.accumulation * recipe.train.tbptt_chunks
    size, trained = (n * element_size(recipe) for n in (model.num_parameters, model.num_trained))
    if stage == 0:
        return [Exchange("all-reduce gradients", trained, 2, ranks)]
    gather = Exchange("all-gather new weights", trained, 1, ranks)
    if stage == 1:
        return [Exchange("all-reduce gradients", trained, 2, ranks), gather]
    if stage == 2:
        return [
            Exchange("all-reduce gradients of every micro-batch", micro_batches * trained, 2, ranks),
            gather,
        ]
    # What is still there from the forward pass need not be gathered for the backward pass.
    again = max(0.0, 1 - LARGEST_GATHERED / model.num_parameters)
    return [
        Exchange("all-gather weights for every micro-batch", micro_batches * size * (1 + again), 1, ranks),
        Exchange("reduce-scatter gradients of every micro-batch", micro_batches * trained, 1, ranks),
    ]


class LayerBytes(NamedTuple):
    """Bytes that one layer makes the ranks of a sequence send, all of them together."""

    forward: int
    """In one forward pass of a micro-batch."""
    step: int
    """In one optimizer step: forward and backward passes of all micro-batches."""


def sequence_bytes(model: HybridLM, recipe: Recipe, geometry: Geometry) -> list[LayerBytes]:
    """Count what every layer makes ranks send, exactly. A backward pass sends as much as a forward one, and
    activation checkpointing repeats that."""
    size, context = recipe.parallel.sequence, recipe.data.context
    packed = recipe.data.boundaries == "respect"
    rows, tokens = (1, geometry.micro_batch * context) if packed else (geometry.micro_batch, context)
    passes = 3 if recipe.train.activation_checkpointing else 2
    forward = (
        model.exchange_bytes(rows, tokens, size, element_size(recipe))
        if size > 1
        else [0] * len(model.layers)
    )
    return [LayerBytes(count, count * passes * geometry.accumulation) for count in forward]
