"""Loss and bits per byte on held-out text, during training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from hybrid.distributed.context_parallel import whole
from hybrid.distributed.world import World

from .tbptt import Carried, cut

if TYPE_CHECKING:
    from hybrid.data.validation import ValidationSet


class Score(NamedTuple):
    """How well held-out text was predicted."""

    loss: float
    """Nats per counted token."""
    bits_per_byte: float
    """Nats of all counted tokens / (ln 2 * UTF-8 bytes of the scored text)."""
    tokens: int


@torch.no_grad()
def score(model: nn.Module, held_out: ValidationSet, world: World, tbptt_chunks: int = 1) -> Score:
    """Score the held-out text, every batch read in `tbptt_chunks` pieces; `held_out` gives every rank its own
    batches, equally many, as a partitioned model (ZeRO-3) needs."""
    training = model.training
    model.eval()
    nats, tokens = 0.0, 0
    for batch in held_out:
        carried = Carried()
        for piece in cut(whole(batch), tbptt_chunks):
            loss = carried.read(model, piece, world.device)
            world.pulse.beat("validation")
            nats, tokens = nats + float(loss.total), tokens + int(loss.tokens)
    model.train(training)
    nats, counted = world.gather_numbers([nats, tokens]).sum(0).tolist()
    return Score(nats / max(1, counted), nats / math.log(2) / max(1, held_out.bytes), int(counted))
