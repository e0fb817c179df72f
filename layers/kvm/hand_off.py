"""KVM attention of a sequence sharded over ranks, its state handed on from rank to rank.

Only routing and accumulating are sequential. A rank that has got the state before its chunk takes its own
tokens through these two steps, hands the state on, and then attends at the same time as all others. In the
backward all take back their attention first; then the gradients of the states go the other way. So a rank
keeps its own tokens and all heads, and there may be more ranks than heads.

Shapes: B sequences, t tokens of a rank's chunk, H query heads, G key/value heads, D head size, S ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..context_parallel import SequenceShard
from ..parameters import always_used
from .attention import KVMSpec, KVMState, Routes, advance_state, kvm_attention
from .contributions import Tokens


def handed_numbers(spec: KVMSpec, position: int, batch: int, heads: int, size: int) -> int:
    """Count the numbers that are handed on after `position` tokens at most: slots, window and its gates."""
    slots = heads * (2 * size + 1) * spec.slots_at(position)
    window = heads * (2 * size + int(spec.gated)) * min(position, spec.window_chunks * spec.chunk)
    return batch * (slots + window)


def sharded_attention(
    q: Tensor,
    tokens: Tokens,
    shard: SequenceShard,
    spec: KVMSpec,
    routes: list[Routes] | None,
    **settings: Any,
) -> tuple[Tensor, list[Routes | None]]:
    """Run `kvm_attention`, with its `settings`, for this rank's share `[B, t, H, D]` of a sequence.

    `routes`: decisions to replay, as an earlier call returned them: one entry for each call of the operator.
    """
    replay = list(routes or [])
    segments = shard.lengths or (shard.length,)
    hands_on = shard.rank + 1 < shard.size and shard.segments[shard.rank + 1].carried > 0
    # The first segment may have a state, the last one leave one; those between are documents of their own.
    begin = int(shard.continues)
    end = max(begin, len(segments) - int(hands_on))
    calls = [lengths for lengths in (segments[:begin], segments[begin:end], segments[end:]) if lengths]
    sizes = [sum(lengths) for lengths in calls]
    parts = tokens.split(sizes)

    state, last, handed = _pass_on(parts[-1], shard, spec, hands_on, len(calls) == 1, replay[-1:], settings)
    own_q = list(q.split(sizes, 1))
    # After the attention's backward, as that is when the states' gradients may be waited for.
    own_q[0] = always_used(own_q[0], last)
    outputs, made = [], []
    for index, (part, lengths) in enumerate(zip(parts, calls, strict=True)):
        known = handed if index == len(calls) - 1 and handed else replay[index] if replay else None
        y, _, own = kvm_attention(
            own_q[index], *part, spec=spec, state=state if index == 0 else None, routes=known,
            lengths=lengths if len(lengths) > 1 else (), want_state=False, **settings,
        )  # fmt: skip
        outputs.append(y)
        made.append(known or own)
    return torch.cat(outputs, 1), made


def _pass_on(
    tokens: Tokens,
    shard: SequenceShard,
    spec: KVMSpec,
    hands_on: bool,
    same: bool,
    replay: list[Routes],
    settings: dict[str, Any],
) -> tuple[KVMState | None, Tensor, Routes | None]:
    """Get the state from the rank before, take in this rank's last segment, and hand its state on.

    `same`: the last segment is also the first one, which the state got is for. Returns that state (None where
    this rank begins with a document), the last exchange's result, and the decisions made.
    """
    batch, _, heads, size = tokens.k.shape
    wide = torch.promote_types(tokens.k.dtype, torch.float32)
    # Of the keys, so that every rank's exchanges are in its graph.
    moving = tokens.k.flatten()[:0].to(wide)
    state: KVMState | None = None
    made: Routes | None = None
    got = moving
    for step in range(shard.size - 1):
        if step == shard.rank and hands_on:
            begin = state.fork() if state is not None and same else KVMState.empty(tokens.k, spec.gated)
            after, made = advance_state(
                *tokens, spec=spec, state=begin, routes=replay[0] if replay else None,
                norm_weight=settings["norm_weight"], norm_bias=settings["norm_bias"],
            )  # fmt: skip
            moving = always_used(_packed(after, wide), moving)  # even where a document begins here
        count = handed_numbers(spec, (step + 1) * shard.length, batch, heads, size)
        moving = shard.hand_on(step, moving, count)
        if step + 1 == shard.rank and shard.continues:
            state = _unpacked(moving, tokens.k, spec, shard.carried)
        if step + 1 == shard.rank:
            got, moving = moving, moving[:0]
    return state, moving if shard.rank + 1 < shard.size else got, made


_FIELDS = ("key_sums", "value_sums", "radius", "window_k", "window_v", "window_gate")


def _packed(state: KVMState, dtype: torch.dtype) -> Tensor:
    held = state.tensors()
    return torch.cat([held[name].flatten().to(dtype) for name in _FIELDS if name in held])


def _unpacked(numbers: Tensor, like: Tensor, spec: KVMSpec, position: int) -> KVMState:
    """Rebuild the state after `position` tokens, for keys like `like` `[B, *, G, D]`."""
    batch, _, heads, size = like.shape
    slots, held = spec.slots_at(position), position - spec.window_start(position)
    shapes: list[tuple[int, ...]] = [(batch, heads, slots, n) for n in (size, size, 1)]
    shapes += [(batch, held, heads, size)] * 2
    if spec.gated:
        shapes.append((batch, held, heads))
    sizes = [math.prod(shape) for shape in shapes]
    pieces = numbers[: sum(sizes)].split(sizes)
    fields = {name: x.view(shape) for name, x, shape in zip(_FIELDS, pieces, shapes, strict=False)}
    for name in ("window_k", "window_v"):
        fields[name] = fields[name].to(like.dtype)
    return KVMState(position, slots, held, **fields)
