"""Exchanges between ranks that share a sequence: values, gradients, bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.layers import Context, LayerError, Mixer, Site
from hybrid.layers.context_parallel import Segments, SequenceShard, heads_per_rank, padded

from ..pretended_cuda import assert_aligned
from .mixers import HIDDEN, build

B, T = 2, 8


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(size: int, rank: int = 0, tokens: int = T, whole: tuple[int, ...] = ()) -> SequenceShard:
    """A shard that exchanges nothing."""
    return SequenceShard(None, rank, size, tokens, whole)


def in_rank(x: Tensor, weight: Tensor, operation: str) -> tuple[Tensor, Tensor, dict[str, int]]:
    """`operation` on rank r's `x[r]`: result, gradient of the weighted sum of all ranks' results, bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = SequenceShard(None, rank, size, T)
    mine = x[rank].clone().requires_grad_()
    y = shard.to_heads(mine)[0] if operation == "to_heads" else getattr(shard, operation)(mine)
    (y * weight[rank]).sum().backward()
    assert mine.grad is not None
    return y.detach(), mine.grad, dict(shard.sent)


def check(pool: Any, x: Tensor, expected: Tensor, operation: str, sent: list[int]) -> None:
    """`x` and `expected` are stacked over ranks, `expected` computed from `x` in one process."""
    weight = numbers(*expected.shape, seed=1)
    (gradient,) = torch.autograd.grad((expected * weight).sum(), x)
    found = pool.run(in_rank, x.detach(), weight, operation)
    for rank, (y, grad, counted) in enumerate(found):
        assert torch.equal(y, expected[rank])
        torch.testing.assert_close(grad, gradient[rank])
        assert counted == {operation: sent[rank]}


def earlier_in_rank(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = SequenceShard(None, rank, size, T)
    mine = x[rank].clone().requires_grad_()
    y = shard.earlier(mine)
    (y * weight[rank, :rank]).sum().backward()
    assert mine.grad is not None
    return y.detach(), mine.grad, shard.sent.total()


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 4])
class TestExchanges:
    def test_earlier_gives_what_stands_before(self, rank_pools: Any, size: int):
        x, weight = numbers(size, 3, 5), numbers(size, size, 3, 5, seed=1)
        for rank, (y, grad, sent) in enumerate(rank_pools(size).run(earlier_in_rank, x, weight)):
            assert torch.equal(y, x[:rank])
            torch.testing.assert_close(grad, weight[rank + 1 :, rank].sum(0))
            assert sent == (size - 1) * 15 * 8  # to the later ranks, and gradients to the earlier ones

    def test_gather_gives_all_and_sums_the_gradients(self, rank_pools: Any, size: int):
        x = numbers(size, 3, 5).requires_grad_()
        expected = x.expand(size, size, 3, 5)
        check(rank_pools(size), x, expected, "gather", [2 * (size - 1) * 15 * 8] * size)

    def test_previous_hands_on_to_the_next_rank(self, rank_pools: Any, size: int):
        x = numbers(size, 3, 5).requires_grad_()
        expected = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
        once = 15 * 8
        sent = [once, *[2 * once] * (size - 2), once]
        check(rank_pools(size), x, expected, "previous", sent)

    @pytest.mark.parametrize("heads", [1, 2, 4, 8])
    def test_to_heads_gives_all_tokens_of_its_share_of_heads(self, rank_pools: Any, size: int, heads: int):
        """Fewer heads than ranks are replicated, and their gradients summed."""
        x = numbers(size, B, T // size, heads, 3).requires_grad_()
        row = x.movedim(0, 1).flatten(1, 2)
        expected = torch.stack([row[:, :, alone(size, rank).own_heads(heads)] for rank in range(size)])
        once = (size - 1) * B * T // size * padded(max(1, heads // size) * 3) * 8
        check(rank_pools(size), x, expected, "to_heads", [2 * once] * size)

    def test_to_tokens_is_its_inverse(self, rank_pools: Any, size: int):
        y = numbers(size, B, T, 3, 5).requires_grad_()  # of every rank its 3 heads
        row = y.movedim(0, 2).flatten(2, 3)
        expected = torch.stack(row.chunk(size, 1))
        once = (size - 1) * B * T // size * 15 * 8
        check(rank_pools(size), y, expected, "to_tokens", [2 * once] * size)


def several(x: list[Tensor]) -> tuple[list[Tensor], int]:
    shard = SequenceShard(None, dist.get_rank(), dist.get_world_size(), T)
    found = shard.to_heads(*[part[:, shard.span] for part in x])
    return found, shard.sent["to_heads"]


@pytest.mark.ranks
def test_queries_keys_and_a_gate_travel_together(two_ranks: Any):
    """Of unequal heads and sizes, in bf16 too; kernels for CUDA can load each, which the gate beside a value
    would move from where they need it."""
    x = [numbers(B, T, heads, size).bfloat16() for heads, size in ((4, 6), (2, 6), (1, 6), (2, 1))]
    for rank, (found, sent) in enumerate(two_ranks.run(several, x)):
        for whole, part in zip(x, found, strict=True):
            assert torch.equal(part, whole[:, :, alone(2, rank).own_heads(whole.shape[2])])
            assert_aligned(part[:, :, 0])
        assert sent == B * T // 2 * (16 + 8 + 8 + 8) * 2


@pytest.mark.parametrize(
    ("whole", "chunks"),
    [
        ((), [((4,), 0), ((4,), 4)]),
        ((8,), [((4,), 0), ((4,), 4)]),
        ((4, 4), [((4,), 0), ((4,), 0)]),
        ((1, 5, 2), [((1, 3), 0), ((2, 2), 3)]),
    ],
)
def test_a_packed_row_is_sharded_through_its_documents(whole: tuple[int, ...], chunks: list[Any]):
    shards = [alone(2, rank, whole=whole) for rank in range(2)]
    assert shards[0].segments == tuple(Segments(*chunk) for chunk in chunks)
    for shard, (lengths, carried) in zip(shards, chunks, strict=True):
        assert shard.lengths == (lengths if whole else ())
        assert (shard.carried, shard.continues) == (carried, carried > 0)
    assert [shard.span for shard in shards] == [slice(0, 4), slice(4, 8)]


def test_a_document_over_three_ranks_counts_what_came_before():
    shard = alone(4, 3, 16, whole=(2, 14))
    assert [chunk.carried for chunk in shard.segments] == [0, 2, 6, 10]
    x = torch.zeros(1, 4, 3)
    context = Context.of(x, want_state=False, shard=alone(4, 0, 16, whole=(2, 14)))
    assert (context.lengths, context.row_lengths) == ((2, 2), (2, 14))
    assert context.cu_seqlens is not None
    assert context.cu_seqlens.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: alone(4, tokens=130), "130 tokens do not divide over 4 ranks: 130 / 4 = 32.5"),
        (lambda: alone(2, 2), "rank 2 of a group of 2"),
        (lambda: alone(2, whole=(3, 4)), "documents of (3, 4) tokens in a row of 8"),
        (lambda: heads_per_rank(6, 4), "6 heads cannot be shared out over 4 ranks"),
        (lambda: Context.of(torch.zeros(1, 5, 3), want_state=False, shard=alone(2)), "5 tokens on rank 0"),
        (lambda: Context.of(torch.zeros(1, 4, 3), shard=alone(2)), "set want_state to False"),
        (
            lambda: Context.of(torch.zeros(1, 4, 3), torch.tensor([0, 4]), shard=alone(2)),
            "leave cu_seqlens out",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(make: Any, words: str):
    with pytest.raises(LayerError, match=re.escape(words)):
        make()


def test_a_mixer_that_cannot_share_a_sequence_is_refused():
    class Unknowing(Mixer):
        kind = "unknowing"

    with pytest.raises(LayerError, match=r"layer 3 \(unknowing\) has no way to shard .* over 2 ranks"):
        Unknowing.check_sharding(None, Site(HIDDEN, layer=3, num_layers=4), 2, T)


def test_a_sharded_sequence_goes_on_from_no_state():
    mixer = build("full")
    x = torch.zeros(1, 4, HIDDEN, dtype=torch.float64)
    with pytest.raises(LayerError, match="goes on from no state"):
        mixer(x, Context.of(x, want_state=False, shard=alone(2)), mixer.empty_state(1))
