"""Whole models with sequences cut over ranks: loss and gradients of one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.layers.context_parallel import SequenceShard
from hybrid.model import HybridLM
from hybrid.model.head import IGNORE

from ..mini import borders, ids, mini

T = 96
ROWS: list[tuple[int, ...]] = [(), (23, 2, 50, 21), (48, 48)]

LETTERS = "KFWBQRGDM"
DRAWN = ["".join(random.Random(seed).choices(LETTERS, k=5)) for seed in range(4)]

Result = tuple[float, int, dict[str, Tensor]]


HANDED = "RKKW"
"""A pattern whose KVM layers have three heads, which no test's ranks can share."""


def model_of(pattern: str, again: bool) -> HybridLM:
    three = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 16}
    model = (mini(pattern, layers={"K": three}) if pattern == HANDED else mini(pattern)).double()
    model.activation_checkpointing = again
    return model


def loss_of(model: HybridLM, row: tuple[int, ...], shard: SequenceShard | None) -> Result:
    """Sum of the counted tokens' losses, their number, and its gradients. The last quarter is not counted."""
    batch = ids(T + 1, 1 if row else 2)
    tokens, labels = batch[:, :-1], batch[:, 1:].clone()
    labels[:, T * 3 // 4 :] = IGNORE
    if shard is not None:
        tokens, labels = tokens[:, shard.span], labels[:, shard.span]
    cu_seqlens = borders(*row) if row and shard is None else None
    found = model(tokens, labels=labels, cu_seqlens=cu_seqlens, shard=shard)
    found.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return float(found.total.detach()), int(found.tokens), gradients


def on_rank(pattern: str, again: bool) -> list[Result]:
    model = model_of(pattern, again)
    rank, size = dist.get_rank(), dist.get_world_size()
    return [loss_of(model, row, SequenceShard(None, rank, size, T, row)) for row in ROWS]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("pattern", "size", "again"),
    [
        ("RGDM", 2, False),
        ("MRDGR", 4, True),
        (HANDED, 2, True),
        (HANDED, 4, False),
        *((drawn, 2 + 2 * (i % 2), i > 1) for i, drawn in enumerate(DRAWN)),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(rank_pools: Any, pattern: str, size: int, again: bool):
    """Also where blocks run again for the backward pass, and with a rank that has nothing counted."""
    model, ranks = model_of(pattern, False), rank_pools(size).run(on_rank, pattern, again)
    for row, found in zip(ROWS, zip(*ranks, strict=True), strict=True):
        total, counted, gradients = loss_of(model, row, None)
        assert sum(one[0] for one in found) == pytest.approx(total, rel=1e-6)
        assert sum(one[1] for one in found) == counted
        for name, expected in gradients.items():
            together = torch.stack([one[2][name] for one in found]).sum(0)
            bound = max(1e-5 * float(expected.abs().max()), 1e-7)  # logits and loss are fp32
            torch.testing.assert_close(
                together, expected, atol=bound, rtol=0, msg=lambda m, n=name, r=row: f"{n} {r}: {m}"
            )
