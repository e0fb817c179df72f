"""The output head, and the cross-entropy over some tokens at a time, so that a large vocabulary at a long
context never has all its logits in memory: neither in the forward pass nor in the backward one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORE = -100
"""The label of a token that is not counted."""


class Loss(NamedTuple):
    """Sums over the counted tokens of a call; fp32 scalars, the count int64."""

    total: Tensor
    """Sum of the tokens' cross-entropies in nats."""
    tokens: Tensor
    """How many tokens were counted."""
    z_total: Tensor
    """Sum of logsumexp(logits)^2; carries a gradient only when the call's `z_loss` is not 0."""
    state: Any = None
    """What the call left to go on from, where it was asked for one."""
    outside: Tensor | None = None
    """How many ids and labels the vocabulary does not have, which others stood in for, where the host did not
    wait to see (on a GPU); None: none."""
    kl: Tensor | None = None
    """Sum of the tokens' KL(teacher || student), where a lesson with logits was given."""
    hidden: Tensor | None = None
    """Sum of the tokens' mean errors of blocks, where a lesson with streams was given."""


class Lesson(NamedTuple):
    """What a teacher made of the tokens that a student reads (`HybridLM.teach`), in its own dtype."""

    hidden: Tensor
    """Normalised last hidden states `[B, T, C]`."""
    logits: Callable[[Tensor], Tensor]
    """Maps some of them to fp32 logits."""
    streams: list[Tensor] | None = None
    """The residual stream `[B, T, C]` before every block and after the last: blocks are to be aligned."""


class Head(nn.Module):
    """Linear map of hidden states to logits, or straight to the loss. The weight is used nowhere but in
    `forward`, so that a partitioned weight (ZeRO-3) is whole whenever it is needed."""

    def __init__(
        self, hidden_size: int, vocab_size: int, softcap: float = 0.0, weight: nn.Parameter | None = None
    ) -> None:
        """`weight` `[V, C]`: the embedding's, for tied embeddings; None: a weight of its own."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size)) if weight is None else weight
        self.softcap = softcap

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        loss_chunk: int = 2048,
        with_z: bool = False,
        lesson: Lesson | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute logits fp32 `[B, T, V]` of `hidden` `[B, T, C]`; with `labels` `[B, T]` the sums (total,
        z_total) over tokens whose label is not -100, and with a lesson that of KL(teacher || student), from
        logits of at most `loss_chunk` tokens at once."""
        if labels is None:
            return self.logits(hidden)
        rows = [hidden.flatten(0, 1), labels.flatten()] + ([lesson.hidden.flatten(0, 1)] if lesson else [])
        chunks = list(zip(*(row.split(loss_chunk) for row in rows), strict=True))
        sums = partial(self._sums, with_z=with_z, teacher=lesson and lesson.logits)
        if torch.is_grad_enabled() and len(chunks) > 1:  # else its logits may as well be kept
            sums = partial(checkpoint, sums, use_reentrant=False, preserve_rng_state=False)
        found = zip(*(sums(*chunk) for chunk in chunks), strict=True)
        return tuple(torch.stack(values).sum() for values in found)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute fp32 logits, `softcap * tanh(logits / softcap)` where there is a cap."""
        logits = F.linear(hidden, self.weight).float()
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def _sums(
        self, hidden: Tensor, labels: Tensor, taught: Tensor | None = None, *, with_z: bool, teacher: Any
    ) -> tuple[Tensor, ...]:
        """Sum cross-entropy and logsumexp^2 over the counted tokens of `hidden` `[N, C]`, and the KL
        divergence from what `teacher` makes of `taught` `[N, C']`."""
        logits_NV = self.logits(hidden)
        counted = labels != IGNORE
        target = labels.clamp(min=0).unsqueeze(-1)
        losses = F.cross_entropy(logits_NV, target.squeeze(-1), reduction="none")
        lse = losses + logits_NV.gather(-1, target).squeeze(-1)  # cheaper than another pass over the logits
        squares = (lse if with_z else lse.detach()).square()
        zero = losses.new_zeros(())
        found = [losses, squares]
        if taught is not None:
            with torch.no_grad():
                wanted = teacher(taught).log_softmax(-1)
            kl = F.kl_div(logits_NV.log_softmax(-1), wanted, reduction="none", log_target=True)
            found.append(kl.sum(-1))
        return tuple(torch.where(counted, values, zero).sum() for values in found)
