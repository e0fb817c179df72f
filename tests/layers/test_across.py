"""Linear recurrences over a sharded sequence, shard by shard in one process: the mathematics, no exchange."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid.layers.context_parallel import SequenceShard
from hybrid.layers.linear.across import AcrossRanks, DecayAcrossRanks, fold
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.linear.rwkv7_op import LEAST_LOG_DECAY, rwkv7_recurrence
from hybrid.layers.linear.ssd import ssd

T = 140  # in four parts of 35 tokens, which no operator's chunk divides
LAYOUTS = [(), (140,), (70, 70), (34, 37, 69), (35, 1, 104), (20, 100, 20), (3, 2, 1, 64, 1, 1, 1, 67)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def operands(name: str, batch: int) -> tuple[AcrossRanks, dict[str, Tensor]]:
    """Of two key heads and four value heads, or four heads; key width 6, value width 10."""
    heads, key, value = 4, 6, 10
    unit = torch.nn.functional.normalize
    if name == "ssd":
        return DecayAcrossRanks(ssd), {
            "x": draw(batch, T, heads, value),
            "b": draw(batch, T, 2, key),
            "c": draw(batch, T, 2, key, seed=1),
            "g": -draw(batch, T, heads).abs() / 20,
        }
    if name == "rwkv7":
        direction = unit(draw(batch, T, heads, key, seed=3), dim=-1)
        return AcrossRanks(rwkv7_recurrence), {
            "r": draw(batch, T, heads, key),
            "log_decay": LEAST_LOG_DECAY * torch.sigmoid(draw(batch, T, heads, key, seed=1) - 3),
            "k": draw(batch, T, heads, key, seed=2),
            "v": draw(batch, T, heads, value),
            "a": -direction,
            "b": direction * torch.sigmoid(draw(batch, T, heads, key, seed=4) - 2),
        }
    decay = (batch, T, heads, key) if name == "kimi_delta" else (batch, T, heads)
    return AcrossRanks(gated_delta_rule), {
        "q": unit(draw(batch, T, 2, key), dim=-1),
        "k": unit(draw(batch, T, 2, key, seed=1), dim=-1),
        "v": draw(batch, T, heads, value),
        "g": -draw(*decay).abs() / 20,
        "beta": torch.sigmoid(draw(batch, T, heads, seed=1) - 2),
    }


def in_parts(across: AcrossRanks, tokens: dict[str, Tensor], size: int, whole: tuple[int, ...]) -> Tensor:
    shards = [SequenceShard(None, rank, size, T, whole) for rank in range(size)]
    dtype = next(iter(tokens.values())).dtype
    parts = [
        across.from_zero(
            {name: x[:, shard.span] for name, x in tokens.items()}, shard.lengths, shard.continues, dtype
        )
        for shard in shards
    ]
    outs = [parts[0].out]
    for rank, part in enumerate(parts[1:], 1):
        start = fold([one.end for one in parts[:rank]], [one.transition for one in parts[:rank]])
        outs.append(part.from_start(start))
    return torch.cat(outs, 1)


@pytest.mark.parametrize("size", [2, 4, 35])
@pytest.mark.parametrize("name", ["gated_deltanet", "kimi_delta", "rwkv7", "ssd"])
def test_parts_from_zero_give_the_whole_in_values_and_gradients(name: str, size: int):
    """With documents that begin before, at and after a shard's border, and span three shards or more; shards
    of four tokens."""
    for whole in LAYOUTS if size < 35 else LAYOUTS[-2:]:
        across, tokens = operands(name, 1 if whole else 2)
        inputs = [x.requires_grad_() for x in tokens.values()]
        expected, _ = across.operator(**tokens, lengths=whole)
        found = in_parts(across, tokens, size, whole)
        torch.testing.assert_close(found, expected, atol=1e-11, rtol=0, msg=lambda m, w=whole: f"{w}: {m}")
        weight = draw(*expected.shape, seed=9)
        wanted = torch.autograd.grad((expected * weight).sum(), inputs)
        for one, two in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
            torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["gated_deltanet", "kimi_delta", "rwkv7", "ssd"])
def test_in_fp32_parts_are_as_exact_as_the_whole(name: str):
    """Against the whole in fp64, slow decays and all."""
    across, tokens = operands(name, 2)
    exact, _ = across.operator(**tokens)
    low = {key: x.float() for key, x in tokens.items()}
    whole = (across.operator(**low)[0] - exact).abs().max()
    assert (in_parts(across, low, 4, ()) - exact).abs().max() <= 4 * whole
