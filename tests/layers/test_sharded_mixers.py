"""Every kind of mixer sharded over ranks: as on one rank, in values, gradients and bytes sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.layers import Context, LayerError, Mixer, Site, mixer_class
from hybrid.layers.context_parallel import SequenceShard

from ..third_party import KIND
from .mixers import HIDDEN, KINDS, assert_same_gradients, build, packed_context, small_options, tokens

T = 64
ROWS = {  # batch, documents
    "equal": (2, ()),
    "packed": (1, (3, 30, 1, 17, 13)),  # over two borders, one token long, ending at none
    "aligned": (1, (16, 32, 16)),  # as the chunks of four ranks
    "long": (1, (14, 40, 10)),  # one over all four ranks, begun just before the second one
}


def weighted(y: Tensor, span: slice) -> Tensor:
    """A sum that gives every number of the whole row's output its own gradient."""
    generator = torch.Generator().manual_seed(7)
    return (y * torch.randn(y.shape[0], T, HIDDEN, generator=generator, dtype=y.dtype)[:, span]).sum()


def gradients(mixer: Mixer, x: Tensor, loss: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(mixer.named_parameters())}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)
    }


def in_rank(kind: str, row: str, changes: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], int, int]:
    """Output, gradients, and the bytes sent forward and in all."""
    batch, whole = ROWS[row]
    shard = SequenceShard(None, dist.get_rank(), dist.get_world_size(), T, whole)
    mixer = build(kind, **changes)
    x = tokens(batch, T)[:, shard.span].clone().requires_grad_()
    y, state = mixer(x, Context.of(x, want_state=False, shard=shard))
    assert state is None
    forward = shard.sent.total()
    found = gradients(mixer, x, weighted(y, shard.span))
    return y.detach(), found, forward, shard.sent.total()


def on_one(kind: str, row: str, changes: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    batch, whole = ROWS[row]
    mixer = build(kind, **changes)
    x = tokens(batch, T).requires_grad_()
    context = packed_context(x, list(whole), want_state=False) if whole else Context.of(x, want_state=False)
    y, _ = mixer(x, context)
    return y.detach(), gradients(mixer, x, weighted(y, slice(None)))


def check(pool: Any, kind: str, row: str, **changes: Any) -> None:
    y, expected = on_one(kind, row, changes)
    found = pool.run(in_rank, kind, row, changes)
    torch.testing.assert_close(torch.cat([one[0] for one in found], 1), y, atol=1e-10, rtol=0)
    together = {"x": torch.cat([one[1].pop("x") for one in found], 1)}
    together |= {name: sum((one[1][name] for one in found), torch.zeros(())) for name in found[0][1]}
    assert_same_gradients(together, expected, 1e-10)
    batch, _ = ROWS[row]
    formula = build(kind, **changes).exchange_bytes(batch, T, pool.size, 8)
    assert sum(one[2] for one in found) == formula
    assert sum(one[3] for one in found) == 2 * formula


@pytest.mark.ranks
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != KIND])
def test_a_sharded_sequence_is_mixed_as_a_whole_one(rank_pools: Any, kind: str, size: int, row: str):
    """verl-project/verl#1226: two key/value heads over four ranks too."""
    check(rank_pools(size), kind, row)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["kvm", "sliding_window"])
def test_without_token_shift_and_gates(two_ranks: Any, kind: str):
    check(two_ranks, kind, "packed", token_shift=False, gate_keys=False, gate_values=False)


@pytest.mark.parametrize("kind", ["full", "block_window"])
@pytest.mark.parametrize(
    ("heads", "shared", "length", "size", "fault"),
    [
        (6, 6, 128, 4, "6 query heads and 6 key/value heads cannot be shared"),
        (8, 2, 130, 4, "130 tokens cannot be shared"),
        (8, 4, 128, 16, "8 query heads cannot be shared"),
        (12, 4, 126, 6, "4 key/value heads cannot be shared"),
    ],
)
def test_what_does_not_divide_is_refused_with_all_numbers(
    kind: str, heads: int, shared: int, length: int, size: int, fault: str
):
    """verl-project/verl#1226."""
    options = small_options(kind, num_heads=heads, num_kv_heads=shared, head_dim=4, chunk=64)
    with pytest.raises(LayerError) as error:
        mixer_class(kind).check_sharding(options, Site(HIDDEN, 1, 2), size, length)
    start = (
        f"layer 1 ({kind}) has {heads} query heads and {shared} key/value heads, for {length} tokens sharded"
    )
    assert str(error.value).startswith(f"{start} over {size} ranks: {fault}")


@pytest.mark.ranks
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 8},  # which four ranks cannot share
        {"window": 17},  # as many keys as a chunk has
        {"window": 1},
        {"window": 18},  # one more: by heads
    ],
    ids=str,
)
def test_windows_reach_into_the_chunk_before(four_ranks: Any, row: str, changes: dict[str, int]):
    check(four_ranks, "sliding_window", row, **changes)


@pytest.mark.ranks
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 8},  # which four ranks cannot share
        {"chunk": 5, "sinks": 5},  # ranks begin inside blocks, and sinks lie on both sides of a border
        {"chunk": 16, "window_chunks": 1, "sinks": 16},  # all of a rank's chunk
        {"chunk": 4, "window_chunks": 4, "sinks": 0},
        {"chunk": 1, "window_chunks": 1, "sinks": 1},  # sinks alone
        {"chunk": 1, "window_chunks": 1, "sinks": 0},  # nothing
        {"chunk": 6, "window_chunks": 3},  # 17 keys of chunks of 16: by heads
    ],
    ids=str,
)
def test_block_windows_reach_into_the_chunk_before(four_ranks: Any, row: str, changes: dict[str, int]):
    check(four_ranks, "block_window", row, **changes)


def test_a_window_exchanges_what_is_less():
    def halo(size: int, tokens: int, kind: str = "sliding_window", **changes: int) -> int | None:
        return mixer_class(kind).halo_of(small_options(kind, **changes), Site(HIDDEN), size, tokens)

    assert halo(4, 64) == 10
    assert halo(4, 64, window=18) is None  # reaches over more than the chunk before
    assert halo(2, 64, window=33) == 32  # 32 x 2 heads, against 64 x (2 + 1)
    assert halo(2, 64, window=33, num_kv_heads=4) == 32  # 32 x 4 against 64 x (2 + 2)
    assert halo(2, 64, "block_window", sinks=8) == 15  # (15 + 8 x 1) x 2 heads against 64 x (2 + 1)
    assert halo(2, 64, "block_window", chunk=16, sinks=16) == 31
    assert halo(2, 64, "block_window", chunk=17) is None  # 33 keys, chunks of 32
    many = {"chunk": 16, "window_chunks": 1, "num_kv_heads": 4}
    assert halo(4, 64, "block_window", **many, sinks=8) == 15  # (15 + 8 x 2) x 4 against 64 x (1 + 1)
    assert halo(4, 64, "block_window", **many, sinks=9) is None


@pytest.mark.ranks
def test_another_number_of_heads_in_one_process(two_ranks: Any):
    """verl-project/verl#1226: nothing is left over from an earlier layer."""
    for heads in (8, 12):
        check(two_ranks, "full", "equal", num_heads=heads, num_kv_heads=heads // 2, head_dim=4)


@pytest.mark.ranks
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (4, {"num_heads": 3, "num_kv_heads": 1, "head_dim": 8}),
        (4, {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "chunk": 6}),  # ranks begin inside chunks
        (2, {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8, "gate_keys": False, "gate_values": False}),
        (
            4,
            {
                "num_heads": 1,
                "num_kv_heads": 1,
                "head_dim": 8,
                "chunk": 5,
                "window_chunks": 1,
                "token_shift": False,
            },
        ),
    ],
    ids=str,
)
def test_kvm_hands_its_state_on_where_heads_cannot_be_shared(
    rank_pools: Any, row: str, size: int, changes: dict[str, Any]
):
    """verl-project/verl#1226: more ranks than heads."""
    check(rank_pools(size), "kvm", row, **changes)


def test_kvm_needs_only_tokens_that_divide():
    options = small_options("kvm", num_heads=6, num_kv_heads=6, head_dim=4)
    KVM = mixer_class("kvm")
    KVM.check_sharding(options, Site(HIDDEN), 4, 128)
    with pytest.raises(LayerError, match="130 tokens do not divide over 4 ranks"):
        KVM.check_sharding(options, Site(HIDDEN), 4, 130)


def test_another_packages_layer_that_does_not_know_how_is_refused():
    with pytest.raises(LayerError, match=rf"layer 0 \({KIND}\) has no way to shard a sequence over 2 ranks"):
        mixer_class(KIND).check_sharding(small_options(KIND), Site(HIDDEN), 2, T)
