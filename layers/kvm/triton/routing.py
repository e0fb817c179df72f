"""Routing of a group of updates in one launch: a program walks the updates of one sequence and head.

Decisions are those of `..routing.route` (spec, section 4). They need sums of keys only, which lie in memory
with the form they are read in. Within a program, a barrier parts what writes there from what reads. There are
N * G programs, so a GPU with more multiprocessors than that is not filled.

Shapes: R rows (chunks entering the state, ordered by update, then by sequence), N sequences, G key/value
heads, C tokens of a chunk, S slots, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contributions import Norm
from ..spec import KVMSpec
from .common import PRECISION, padded, standardised

if TYPE_CHECKING:
    from ..steps import Steps

TOKENS, SLOTS = 64, 128
"""Tokens and slots of a block of scores."""
DEPTH = tl.constexpr(16)
"""Inner size of a product, whose operands must fit in registers."""
WARPS = 8


@torch.no_grad()
def route_group(
    keys: Tensor, gate: Tensor | None, before: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Decide on all tokens of a group of updates.

    Args:
        keys: prepared, fp32 `[R, G, C, D]`.
        gate: merge gates, fp32 `[R, G, C]`; None: all 1.
        before: sums of keys before the group, fp32 `[N, G, S0, D]`; S0 may be 0.

    Returns:
        Slots (int64) and whether the token was appended (bool), each `[R, G, C]`.
    """
    assert keys.dtype == before.dtype == torch.float32
    _, heads, chunk, size = keys.shape
    keys, before = keys.contiguous(), before.contiguous()
    sequences, slots = steps.updates[0].sequences, steps.updates[-1].after
    sums, form = keys.new_empty(2, sequences, heads, slots, size)
    best, novelty = keys.new_empty(2, sequences, heads, chunk)
    slot = torch.empty(keys.shape[:3], dtype=torch.int64, device=keys.device)
    founds = torch.zeros_like(slot, dtype=torch.bool)
    gated, by_keys = gate is not None, gate is not None and spec.gate_keys
    gates = keys if gate is None else gate.contiguous()
    route_kernel[(sequences * heads,)](
        keys, gates, before, *norm, steps.table, sums, form, best, novelty, slot, founds.view(torch.int8),
        len(steps.updates), int(steps.updates[0].number == 0), slots, before.shape[2], heads,
        chunk, size, padded(size), min(TOKENS, padded(chunk)), SLOTS, spec.sinks,
        gated and spec.gate_initial, by_keys, by_keys and spec.gate_appends,
        num_warps=WARPS,
    )  # fmt: skip
    return slot, founds


@triton.jit(do_not_specialize=["updates", "initial", "slots", "held"])
def route_kernel(
    keys, gate, before, weight, bias, table, sums, form, best, novelty, slot, founds,
    updates, initial, slots, held, heads,
    chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr,
    sinks: tl.constexpr, gate_initial: tl.constexpr, gate_merged: tl.constexpr, gate_appended: tl.constexpr,
):  # fmt: skip
    """Walk the updates of one sequence and head.

    `sums` and `form`: room for `slots` slots, `[N, G, S, D]`; `held`: slots of `before`; `best` and
    `novelty`: room for scores, `[N, G, C]`; `columns`: the head size, padded; `initial`: 1 where the first
    update makes the initial state, else 0.
    """
    pid = tl.program_id(0)
    n, g = pid // heads, pid % heads
    d = tl.arange(0, columns)
    norm = tl.load(weight + d, d < size, 0.0)[None, :], tl.load(bias + d, d < size, 0.0)[None, :]
    sums, form = sums + pid.to(tl.int64) * slots * size, form + pid.to(tl.int64) * slots * size
    best, novelty = best + pid * chunk, novelty + pid * chunk
    # Copy the sums from before the group, and read them.
    for first in range(0, held, block):
        s = first + tl.arange(0, block)
        x = _load(before + pid.to(tl.int64) * held * size, s, s < held, size, columns)
        _store(sums, form, x, s, s < held, norm, size, columns)
    tl.debug_barrier()
    for u in range(1, updates + 1):
        entry = table + u * 5
        if n < tl.load(entry + 1):
            old, new = tl.load(entry - 3), tl.load(entry + 2)
            row = ((tl.load(entry) + n) * heads + g).to(tl.int64) * chunk
            own_keys, own_gate = keys + row * size, gate + row
            own_slot, own_founds = slot + row, founds + row
            if new - old < chunk:
                _compare(own_keys, form, best, novelty, own_slot, old, sinks, chunk, size, tokens, block)
                tl.debug_barrier()
            if new > old:
                gated = tl.where(u == initial, gate_initial, gate_appended)
                _append(
                    own_keys, own_gate, novelty, own_slot, own_founds, sums, form, old, new, gated, norm,
                    chunk, size, columns, tokens, gate_initial or gate_appended,
                )  # fmt: skip
                tl.debug_barrier()
            if new - old < chunk:
                _decide(
                    own_keys, own_gate, form, best, own_slot, own_founds, old, new,
                    sinks, chunk, size, tokens, block, gate_merged,
                )  # fmt: skip
                tl.debug_barrier()
                if u < updates:  # nobody routes by the sums after the last one
                    _merge(
                        own_keys, own_gate, own_slot, own_founds, sums, form, norm,
                        chunk, size, columns, tokens, gate_merged,
                    )  # fmt: skip
                    tl.debug_barrier()


@triton.jit
def _load(base, row, valid, size: tl.constexpr, columns: tl.constexpr):
    """Load rows of `[.., D]`, 0 where not `valid`."""
    d = tl.arange(0, columns)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * size + d, valid[:, None] & (d < size), 0.0)


@triton.jit
def _store(sums, form, x, s, valid, norm, size: tl.constexpr, columns: tl.constexpr):
    """Store sums of slots `s`, and the form they are read in."""
    d = tl.arange(0, columns)[None, :]
    at, valid = s.to(tl.int64)[:, None] * size + d, valid[:, None] & (d < size)
    y, _ = standardised(x, d < size, size)
    tl.store(sums + at, x, valid)
    tl.store(form + at, y * norm[0] + norm[1], valid)


@triton.jit
def _search(
    keys, t, valid, form, start, end, best, place, sinks, size: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Find a better slot than `place`, whose score is `best`, from `start` to `end`; of equal ones the first.

    Also returns the best score of each token with any of these slots, sinks included.
    """
    novelty = tl.full(best.shape, float("-inf"), tl.float32)
    for first in range(start, end, block):
        s = first + tl.arange(0, block)
        scores = tl.zeros([best.shape[0], block], tl.float32)
        for column in range(0, size, DEPTH):
            d = column + tl.arange(0, DEPTH)
            x = tl.load(keys + t[:, None] * size + d, valid[:, None] & (d < size), 0.0)
            y = tl.load(form + s.to(tl.int64) * size + d[:, None], (s < end) & (d[:, None] < size), 0.0)
            scores = tl.dot(x, y, scores, input_precision=PRECISION)
        scores = tl.where(s < end, scores, float("-inf"))
        novelty = tl.maximum(novelty, tl.max(scores, 1))
        top, index = tl.max(tl.where(s >= sinks, scores, float("-inf")), 1, return_indices=True)
        place = tl.where(top > best, (first + index).to(tl.int64), place)
        best = tl.where(top > best, top, best)
    return best, place, novelty


@triton.jit
def _compare(
    keys, form, best, novelty, slot, old, sinks,
    chunk: tl.constexpr, size: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Choose for every token among the slots before the update."""
    for first in range(0, chunk, tokens):
        t = first + tl.arange(0, tokens)
        top, place = tl.full([tokens], float("-inf"), tl.float32), tl.full([tokens], sinks, tl.int64)
        top, place, any_slot = _search(keys, t, t < chunk, form, 0, old, top, place, sinks, size, block)
        tl.store(best + t, top, t < chunk)
        tl.store(novelty + t, any_slot, t < chunk)
        tl.store(slot + t, place, t < chunk)


@triton.jit
def _append(
    keys, gate, novelty, slot, founds, sums, form, old, new, gated, norm,
    chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, tokens: tl.constexpr,
    has_gate: tl.constexpr,
):  # fmt: skip
    """Give slots `old` to `new` to the most novel tokens (those of the lowest scores), in time order."""
    place = old
    for first in range(0, chunk, tokens):
        t = first + tl.arange(0, tokens)
        found = t < chunk
        if new - old < chunk:
            found = found & (_rank(novelty, t, chunk, tokens) < new - old)
        s = place + tl.cumsum(found.to(tl.int32), 0) - 1
        place += tl.sum(found.to(tl.int32), 0)
        x = _load(keys, t, found, size, columns)
        if has_gate:
            x *= tl.load(gate + t, found & gated, 1.0)[:, None]
        _store(sums, form, x, s, found, norm, size, columns)
        tl.store(slot + t, s.to(tl.int64), found)
        tl.store(founds + t, found.to(tl.int8), t < chunk)


@triton.jit
def _rank(novelty, t, chunk: tl.constexpr, tokens: tl.constexpr):
    """Count the tokens of lower scores than tokens `t`, and the earlier ones of equal scores."""
    own = tl.load(novelty + t, t < chunk, float("inf"))[:, None]
    rank = tl.zeros(t.shape, tl.int32)
    for first in range(0, chunk, tokens):
        j = (first + tl.arange(0, tokens))[None, :]
        other = tl.load(novelty + j, j < chunk, float("inf"))
        sooner = (other < own) | ((other == own) & (j < t[:, None]))
        rank += tl.sum((sooner & (j < chunk)).to(tl.int32), 1)
    return rank


@triton.jit
def _decide(
    keys, gate, form, best, slot, founds, old, new, sinks,
    chunk: tl.constexpr, size: tl.constexpr, tokens: tl.constexpr, block: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Choose for tokens that were not appended among the new slots, too, where an old one wins a tie."""
    for first in range(0, chunk, tokens):
        t = first + tl.arange(0, tokens)
        merged = (t < chunk) & (tl.load(founds + t, t < chunk, 1) == 0)
        place, top = tl.load(slot + t, merged, 0), tl.load(best + t, merged, 0.0)
        top, place, _ = _search(keys, t, merged, form, old, new, top, place, sinks, size, block)
        if gated:  # a gate that underflowed to 0 makes all candidates equal
            place = tl.where(tl.load(gate + t, merged, 1.0) == 0, sinks, place)
        tl.debug_barrier()
        tl.store(slot + t, place, merged)


@triton.jit
def _merge(
    keys, gate, slot, founds, sums, form, norm,
    chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, tokens: tl.constexpr, gated: tl.constexpr,
):  # fmt: skip
    """Add tokens to the sums of their slots, and read these again.

    The first token of each slot takes what all its tokens add, so no other writes there.
    """
    for first in range(0, chunk, tokens):
        t = first + tl.arange(0, tokens)
        leads = (t < chunk) & (tl.load(founds + t, t < chunk, 1) == 0)
        place = tl.load(slot + t, leads, -1)
        added = tl.zeros([tokens, columns], tl.float32)
        for other in range(0, chunk, DEPTH):
            j = other + tl.arange(0, DEPTH)
            merged = (j < chunk) & (tl.load(founds + j, j < chunk, 1) == 0)
            same = place[:, None] == tl.load(slot + j, merged, -2)[None, :]
            leads = leads & (tl.sum((same & (j[None, :] < t[:, None])).to(tl.int32), 1) == 0)
            x = _load(keys, j, merged, size, columns)
            if gated:
                x *= tl.load(gate + j, merged, 0.0)[:, None]
            added = tl.dot(same.to(tl.float32), x, added, input_precision=PRECISION)
        x = _load(sums, place, leads, size, columns) + added
        tl.debug_barrier()
        _store(sums, form, x, place, leads, norm, size, columns)
