"""Key-Value Means attention as a function: exact keys in a window of chunks, everything older in a few slots.

The four steps and where they are:

- `routing.route` decides which slot takes each token that leaves the window;
- `slots.Slots.update` accumulates: it adds a chunk's tokens to their slots;
- `slots.read` turns the sums into keys and values;
- `attend`, here, is one softmax of a chunk's queries over [its slots | its window].

Calls of many chunks go through `chunks` to `walk`, which takes the four steps for chunk after chunk; tokens
of one chunk `enter` the carried state.

Shapes: B sequences, T tokens, H query heads, G key/value heads, D head size, R grid rows, C tokens of a
chunk, S slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import LayerError
from ..softmax import Mask, Part, joined_attention, part_share
from ..softmax.attention import same_dtype
from ..softmax.grid import ChunkGrid
from .budget import Budget
from .chunks import Call, Queries, on_grid
from .contributions import Norm
from .enter import enter, taken
from .routing import Routes, as_routes, first_slots, joined_routes
from .spec import KVMSpec, Update, updates
from .state import KVMState

__all__ = ["Budget", "KVMSpec", "KVMState", "Routes", "kvm_attention"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Leave the function out of what torch.compile compiles: it would unroll the loop over chunks."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            # Only now, as `disable` loads the compiler, which takes a second.
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@_uncompiled
def kvm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None = None,
    *,
    spec: KVMSpec,
    norm_weight: Tensor,
    norm_bias: Tensor,
    front_temperature: Tensor | None = None,
    state_temperature: Tensor | None = None,
    state: KVMState | None = None,
    lengths: Sequence[int] = (),
    routes: Routes | None = None,
    want_state: bool = True,
    want_margins: bool = False,
    statistics: dict[str, Tensor] | None = None,
) -> tuple[Tensor, KVMState | None, Routes]:
    """Key-Value Means attention (the paper's operator; logits are scaled by 1 / sqrt(D)).

    Args:
        q: queries `[B, T, H, D]`, normalised and rotated.
        k, v: keys (normalised and rotated) and values `[B, T, G, D]`; query head h reads head `h // (H / G)`.
        merge_gate: `[B, T, G]`, above 0; None: 1 everywhere.
        norm_weight, norm_bias: `[D]`, the LayerNorm of state keys.
        front_temperature, state_temperature: `[H]`, multiply the logits of window keys and of slots.
        state: what an earlier call returned; it carries the position. Without gradients it is spent.
        lengths: documents packed in the row (B = 1); each starts at position 0, and no state comes out.
        routes: decisions to replay, for at least the tokens that this call absorbs.
        want_margins: report how close each decision was (`Routes.margin`).
        statistics: receives `slots`, `tokens_per_slot` and `state_mass` (mean attention mass on slots).

    Returns:
        `y` `[B, T, H, D]` in q's dtype; the state to go on from (None if not wanted or packed); the routes.

    Routing, sums, norms and radii are in fp32 (float64 for float64 inputs), whatever the inputs' dtype.
    Raises LayerError for shapes, dtypes or routes that do not fit.
    """
    _check(q, k, v, merge_gate, spec, lengths, state)
    for name, given, size in (
        ("norm_weight", norm_weight, q.shape[3]),
        ("norm_bias", norm_bias, q.shape[3]),
        ("front_temperature", front_temperature, q.shape[2]),
        ("state_temperature", state_temperature, q.shape[2]),
    ):
        if given is not None and given.shape != (size,):
            raise LayerError(f"{name} is {tuple(given.shape)}, for q {tuple(q.shape)}: it must be ({size},)")
    q, k, v = same_dtype(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    gate = merge_gate.to(wide) if merge_gate is not None and spec.gated else None
    norm = Norm(norm_weight.to(wide), norm_bias.to(wide))
    call = Call(spec, norm, 1 / math.sqrt(q.shape[-1]), routes, want_margins, statistics)
    temperatures = (front_temperature, state_temperature)
    queries = Queries(q, *(None if t is None else t.to(wide)[:, None] for t in temperatures))
    with torch.autocast(q.device.type, enabled=False):
        if lengths:
            y, made = _packed(call, queries, k, v, gate, lengths)
            return y, None, made
        start = KVMState.empty(k, gate is not None) if state is None else taken(state, k)
        y, after, made = _sequences(call, queries, k, v, gate, start, want_state)
    return y, after if want_state else None, made


def attend(
    call: Call,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    slots: tuple[Tensor, Tensor] | None,
    parts: list[Part],
) -> tuple[Tensor, Tensor | None]:
    """Step 4: one softmax over window keys (`key` 0 of the parts, `query` 0) and slots (`key` 1, `query` 1).

    Args:
        k, v: the window's `[rows, tokens, G, D]`.
        slots: keys and values to read `[rows, G, S, D]`.

    Returns:
        Heads like the queries `[rows, tokens, H, D]`, and, where statistics are wanted, the attention mass on
        slots `[rows, tokens, H]`.
    """
    keys, values = [k], [v]
    if slots is not None:
        keys.append(slots[0].transpose(1, 2))
        values.append(slots[1].transpose(1, 2))
    scaled = list(queries.scaled())
    y, lse = joined_attention(scaled, keys, values, parts, call.scale)
    if call.statistics is None:
        return y, None
    mass = torch.zeros_like(lse)
    with torch.no_grad():
        for part in parts:
            if part.key == 1:
                share = part_share(scaled, keys, values, part, lse, call.scale)
                mass[part.q_rows, :, part.q_tokens] = share
    return y, mass.transpose(1, 2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    spec: KVMSpec,
    lengths: Sequence[int],
    state: KVMState | None,
) -> None:
    if not q.ndim == k.ndim == 4:
        raise LayerError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [batch, tokens, heads, size]")
    batch, tokens, heads, size = q.shape
    if k.shape != v.shape or k.shape[:2] != q.shape[:2] or k.shape[3] != size or heads % k.shape[2]:
        raise LayerError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if gate is not None and gate.shape != k.shape[:3]:
        raise LayerError(f"merge_gate is {tuple(gate.shape)}, for keys {tuple(k.shape)}")
    if not batch or not tokens:
        raise LayerError(f"a call needs at least one sequence of one token, q is {tuple(q.shape)}")
    if spec.rotary_dim >= size:
        raise LayerError(f"rotary_dim is {spec.rotary_dim}; it must be below the head size {size}")
    if lengths and (batch != 1 or sum(lengths) != tokens or min(lengths) < 1):
        raise LayerError(f"lengths {tuple(lengths)} do not cut a packed row of shape {tuple(q.shape[:2])}")
    if state is None:
        return
    if lengths:
        raise LayerError("packed documents start afresh: continue them one by one, each with its own state")
    held = state.tensors()["window_k"]
    if held.shape[0] != batch or held.shape[2:] != k.shape[2:]:
        raise LayerError(f"the state is for keys like {tuple(held.shape)}, these are {tuple(k.shape)}")
    if (state.window_gate is None) != (gate is None or not spec.gated):
        raise LayerError("merge_gate must be given in all calls of a sequence or in none")


# Equal sequences


def _sequences(
    call: Call,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    state: KVMState,
    want_state: bool,
) -> tuple[Tensor, KVMState, Routes]:
    chunk = call.spec.chunk
    room = chunk - state.position % chunk
    tokens = k.shape[1]
    if tokens <= room:
        return _within_chunk(call, queries, k, v, gate, state)
    if room == chunk:
        return _whole_chunks(call, queries, k, v, gate, state, want_state)
    call_head = replace(call, statistics=None)
    cut = [room, tokens - room]
    queries, queries_rest = queries.split(cut)
    (k, k_rest), (v, v_rest) = (x.split(cut, 1) for x in (k, v))
    gate, gate_rest = (None, None) if gate is None else gate.split(cut, 1)
    head, state, made = _within_chunk(call_head, queries, k, v, gate, state)
    rest = queries_rest, k_rest, v_rest, gate_rest
    tail, state, more = _whole_chunks(call, *rest, state, want_state)
    return torch.cat((head, tail), 1), state, joined_routes([made, more])


def _within_chunk(
    call: Call, queries: Queries, k: Tensor, v: Tensor, gate: Tensor | None, state: KVMState
) -> tuple[Tensor, KVMState, Routes]:
    """A call whose tokens all lie in one chunk, such as a token to decode: no grid, and nothing is padded."""
    spec, tokens = call.spec, k.shape[1]
    number = state.position // spec.chunk - spec.window_chunks  # of the update whose slots this chunk reads
    made = enter(call, state, k, v, gate)
    held = state.held - tokens
    parts = [Part(k_tokens=slice(0, held))] if held else []
    parts.append(Part(k_tokens=slice(held, None), mask=Mask.LOWER))
    if tokens == 1:
        parts = [Part()]
    slots = None
    if number >= 0:
        slots = state.read(call.norm, spec, k.dtype)
        parts.append(Part(query=1, key=1))
    window = state.tensors()
    y, mass = attend(call, queries, window["window_k"], window["window_v"], slots, parts)
    if mass is not None:
        call.note(state.slots, spec.coverage(state.position), mass)
    return y, state, made


def _whole_chunks(
    call: Call,
    queries: Queries,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    state: KVMState,
    want_state: bool,
) -> tuple[Tensor, KVMState, Routes]:
    """A call that starts with a chunk."""
    spec, position = call.spec, state.position
    batch, tokens = k.shape[:2]
    window = state.tensors()
    grid = ChunkGrid.equal(batch, tokens, spec.chunk, position, state.held // spec.chunk)
    if state.held:
        k, v = torch.cat((window["window_k"], k), 1), torch.cat((window["window_v"], v), 1)
        gate = None if gate is None else torch.cat((window["window_gate"], gate), 1)
    # While the window still holds the first chunk, the initial state is made again from there.
    first = grid.spans[0].first - spec.window_chunks
    base = state.sums() if first > 0 else None
    last = grid.spans[0].end - 1 - spec.window_chunks
    steps = updates(spec, [max(last, 0)] * batch, max(first, 0), state.slots if first > 0 else 0)
    starts = [(b, 0) for b in range(batch)]
    y, choice, sums = on_grid(call, grid, queries, k, v, gate, steps, base, starts)
    seen = 1 if position and first <= 0 else 0  # the initial state's routes belong to an earlier call
    order = [[u * batch + b for u in range(seen, len(steps))] for b in range(batch)]
    made = as_routes(choice, (steps[0].number + seen) * spec.chunk, order)
    after = state
    if want_state:
        kept = position + tokens - spec.window_start(position + tokens)
        held = [None if x is None else _last(x, kept) for x in (k, v, gate)]
        after = KVMState(position + tokens, steps[-1].after, kept, *sums, *held)
    return y, after, made


def _last(x: Tensor, count: int) -> Tensor:
    """The last `count` tokens of `[B, T, ...]`, not keeping the others' memory."""
    return x[:, x.shape[1] - count :].clone()


# Packed documents


def _packed(
    call: Call, queries: Queries, k: Tensor, v: Tensor, gate: Tensor | None, lengths: Sequence[int]
) -> tuple[Tensor, Routes]:
    """Documents longer than their window share a grid; the others are plain causal attention."""
    spec = call.spec
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    absorbed = [spec.coverage(length) for length in lengths]
    long = [i for i, length in enumerate(lengths) if length > spec.window_chunks * spec.chunk]
    long.sort(key=lambda i: -(-lengths[i] // spec.chunk), reverse=True)
    y: dict[int, Tensor] = {}
    made: dict[int, Routes] = {}
    if long:
        own_lengths = [lengths[i] for i in long]
        grid = ChunkGrid.packed([starts[i] for i in long], own_lengths, spec.chunk, k.device)
        steps = updates(spec, [span.end - 1 - spec.window_chunks for span in grid.spans])
        places = [(0, sum(absorbed[:i])) for i in long]
        heads, choice, _ = on_grid(call, grid, queries, k, v, gate, steps, None, places)
        for place, (i, piece) in enumerate(zip(long, heads.split(own_lengths, 1), strict=True)):
            y[i], made[i] = piece, as_routes(choice, 0, [_rows_of(steps, place)])
    if len(long) < len(lengths):
        own_queries = queries.split(lengths)
        pieces = zip(*(x.split(list(lengths), 1) for x in (k, v)), strict=True)
        for i, (own_k, own_v) in enumerate(pieces):
            if i not in y:
                y[i], _ = attend(call, own_queries[i], own_k, own_v, None, [Part(mask=Mask.LOWER)])
                first = own_k[:, : absorbed[i]].detach().transpose(1, 2)
                made[i] = as_routes(first_slots(first, margins=call.margins), 0)
    if not long and call.statistics is not None:
        call.note(sum(absorbed) / len(lengths), sum(absorbed) / len(lengths), k.new_zeros(1))
    order = range(len(lengths))
    return torch.cat([y[i] for i in order], 1), joined_routes([made[i] for i in order])


def _rows_of(steps: Sequence[Update], sequence: int) -> list[int]:
    """The rows of one sequence, in time."""
    found, row = [], 0
    for step in steps:
        if sequence < step.sequences:
            found.append(row + sequence)
        row += step.sequences
    return found
