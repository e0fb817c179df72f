"""The linear mixers with a sequence sharded over ranks, against the same mixer with all of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.layers import Context, LayerError, Site, mixer_class
from hybrid.layers.context_parallel import SequenceShard

from .mixers import HIDDEN, assert_same_gradients, build, packed_context, tokens

T = 148  # in halves of 74 or quarters of 37, which no operator's chunk divides
LAYOUTS: list[tuple[int, ...]] = [
    (),
    (148,),
    (74, 74),  # at shards' borders, and one document over two of four ranks
    (73, 75),  # a segment of one token, shorter than the convolutions
    (35, 3, 37, 73),  # begins two before a border, ends one after it
    (20, 100, 28),  # over three ranks or more
    (3, 2, 1, 68, 1, 1, 1, 71),  # several in a rank
]
VARIANTS = [
    ("rwkv7", {}),
    ("rwkv7", {"token_shift": False}),
    ("gated_deltanet", {}),
    ("gated_deltanet", {"num_heads": 1, "num_v_heads": 1, "head_k_dim": 5, "head_v_dim": 3, "conv_size": 2}),
    ("gated_deltanet", {"use_short_conv": False, "allow_neg_eigval": True}),
    ("kimi_delta", {}),
    ("mamba2", {}),
    ("mamba2", {"conv_size": 1}),
]
LATER = Site(HIDDEN, layer=1, num_layers=2)  # makes its kind's shared values from the embeddings
Case = tuple[str, dict[str, Any], torch.dtype]


def given(layout: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, embeddings, and what the outputs are weighted by."""
    batch, length = 1 if layout else 2, sum(layout) or T
    return tuple(tokens(batch, length, dtype, seed) for seed in (1, 2, 3))


def weighted(mixer: Any, x: Tensor, embedding: Tensor, weight: Tensor, y: Tensor) -> dict[str, Tensor]:
    named = {"x": x, "embedding": embedding, **dict(mixer.named_parameters())}
    found = torch.autograd.grad((y * weight).sum(), list(named.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)
    }


def on_rank(case: Case, layouts: list[tuple[int, ...]]) -> list[tuple[Tensor, dict[str, Tensor], int, int]]:
    """For each layout: this rank's outputs, gradients, bytes sent in the forward pass and in both."""
    kind, changes, dtype = case
    mixer, results = build(kind, dtype, site=LATER, **changes), []
    for layout in layouts:
        whole = given(layout, dtype)
        shard = SequenceShard(None, dist.get_rank(), dist.get_world_size(), whole[0].shape[1], layout)
        x, embedding, weight = (full[:, shard.span].clone() for full in whole)
        x.requires_grad_(), embedding.requires_grad_()
        y, none = mixer(x, Context.of(x, want_state=False, shard=shard, embedding=embedding))
        assert none is None
        sent = shard.sent.total()
        found = weighted(mixer, x, embedding, weight, y)
        results.append((y.detach(), found, sent, shard.sent.total()))
        with torch.no_grad():
            again, _ = mixer(x, Context.of(x, want_state=False, shard=shard, embedding=embedding))
        torch.testing.assert_close(again, y, atol=1e-6, rtol=0)
    return results


def check(pool: Any, case: Case, layouts: list[tuple[int, ...]], tolerance: float) -> None:
    """Outputs and all gradients of the ranks are those of one process, and they sent what is announced."""
    kind, changes, dtype = case
    mixer = build(kind, dtype, site=LATER, **changes)
    found = pool.run(on_rank, case, layouts)
    for layout, ranks in zip(layouts, zip(*found, strict=True), strict=True):
        x, embedding, weight = given(layout, dtype)
        x.requires_grad_(), embedding.requires_grad_()
        more = {"want_state": False, "embedding": embedding}
        context = packed_context(x, list(layout), **more) if layout else Context.of(x, **more)
        expected, _ = mixer(x, context)
        wanted = weighted(mixer, x, embedding, weight, expected)
        outputs, parts, sent, both = zip(*ranks, strict=True)
        torch.testing.assert_close(
            torch.cat(outputs, 1), expected, atol=tolerance, rtol=0, msg=lambda m, at=layout: f"{at}: {m}"
        )
        got = {
            name: torch.cat([one[name] for one in parts], 1)
            if name in ("x", "embedding")
            else torch.stack([one[name] for one in parts]).sum(0)
            for name in wanted
        }
        assert_same_gradients(got, wanted, tolerance)
        assert sum(sent) == mixer.exchange_bytes(x.shape[0], x.shape[1], pool.size, x.element_size())
        assert sum(both) == 2 * sum(sent)


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_a_sharded_sequence_gives_the_same_outputs_and_gradients(
    four_ranks: Any, kind: str, changes: dict[str, Any]
):
    """More ranks than heads included; documents begin before, at and after borders."""
    check(four_ranks, (kind, changes, torch.float64), LAYOUTS[::3] if changes else LAYOUTS, 1e-10)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["rwkv7", "gated_deltanet", "kimi_delta", "mamba2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
def test_in_lower_precision(four_ranks: Any, kind: str, dtype: torch.dtype, tolerance: float):
    """bf16 sends its bf16 tokens, and its states in fp32."""
    check(four_ranks, (kind, {}, dtype), [LAYOUTS[0], LAYOUTS[5]], tolerance)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["rwkv7", "gated_deltanet", "kimi_delta", "mamba2"])
def test_chunks_as_short_as_what_a_convolution_sees(four_ranks: Any, kind: str):
    check(four_ranks, (kind, {}, torch.float64), [(12,), (1, 4, 2, 5)], 1e-10)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("rwkv7", 264192), ("gated_deltanet", 313344), ("kimi_delta", 542720), ("mamba2", 539712)],
)
def test_what_is_sent_does_not_grow_with_the_row(kind: str, sent: int):
    """The first is what docs/layers.md quotes."""
    mixer = mixer_class(kind)(mixer_class(kind).Options(), Site(512))
    assert mixer.exchange_bytes(1, 2048, 2, 4) == mixer.exchange_bytes(1, 16384, 2, 4) == sent


@pytest.mark.parametrize("kind", ["gated_deltanet", "kimi_delta", "mamba2"])
def test_shorter_chunks_are_refused_with_the_numbers(kind: str):
    mixer, x = build(kind, torch.float32, site=LATER), tokens(1, 2, torch.float32)
    context = Context.of(x, want_state=False, shard=SequenceShard(None, 0, 4, 8))
    words = (
        f"layer 1 ({kind}) sees 3 tokens before each (conv_size 4), but 8 tokens sharded over 4 ranks are 2 "
        "each; allowed: at least 12 tokens"
    )
    with pytest.raises(LayerError, match=re.escape(words)):
        mixer(x, context)
