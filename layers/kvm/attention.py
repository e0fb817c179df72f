"""Key-Value Means attention as a function: exact keys in a window of chunks, everything older in a few slots.

`walk` takes four steps for every chunk:

- `route` decides which slot takes each token that leaves the window;
- `accumulate` adds the chunk's tokens to their slots;
- `read` turns the sums into keys and values;
- `attend` is one softmax of the next chunk's queries over [the slots | their window].

Here a call becomes such a walk: of the rows of a grid of chunks, or of the few tokens of one chunk.

Shapes: B sequences, T tokens, H query heads, G key/value heads, D head size, S slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import LayerError
from ..softmax import attention
from ..softmax.attention import same_dtype
from ..softmax.grid import ChunkGrid
from ..softmax.kernels import choose
from .attend import Inputs, Plan, scaled
from .chunks import Group, groups, within_chunk
from .contributions import Norm, Sums, Tokens
from .parallel import choose_walk
from .routing import Choice, Replay, Routes, as_routes, first_slots, in_time, joined_routes
from .slots import Slots
from .spec import Budget, KVMSpec, Update, updates
from .state import KVMState
from .walk import Walk, Walked, walk

__all__ = ["Budget", "KVMSpec", "KVMState", "Routes", "advance_state", "kvm_attention"]

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
    state_bias: Tensor | None = None,
    state: KVMState | None = None,
    lengths: Sequence[int] = (),
    routes: Routes | None = None,
    want_state: bool = True,
    want_routes: bool = True,
    want_margins: bool = False,
    statistics: dict[str, Tensor] | None = None,
) -> tuple[Tensor, KVMState | None, Routes | None]:
    """Compute Key-Value Means attention (the paper's operator; logits are scaled by 1 / sqrt(D)).

    Args:
        q: queries `[B, T, H, D]`, normalised and rotated.
        k, v: keys (normalised and rotated) and values `[B, T, G, D]`; query head h reads head `h // (H / G)`.
        merge_gate: `[B, T, G]`, above 0; None: 1 everywhere.
        norm_weight, norm_bias: `[D]`, the LayerNorm of state keys.
        front_temperature, state_temperature: `[H]`, multiply the logits of window keys and of slots.
        state_bias: `[H]`, added to the logits of slots (not in the paper).
        state: what an earlier call returned; it carries the position. Without gradients it is spent.
        lengths: documents packed in the row (B = 1); each starts at position 0, and no state comes out.
        routes: decisions to replay, for at least the tokens that this call absorbs.
        want_routes: give them; without, packed rows of a batch need no index lists for them.
        want_margins: report how close each decision was (`Routes.margin`).
        statistics: receives `slots`, `tokens_per_slot` and `state_mass` (mean attention mass on slots).

    Returns:
        `y` `[B, T, H, D]` in q's dtype; the state to go on from (None if not wanted or packed); the routes
        (None if not wanted).

    Routing, sums, norms and radii are in fp32 (float64 for float64 inputs), whatever the inputs' dtype.
    Raises LayerError for shapes, dtypes or routes that do not fit.
    """
    _check(q, k, v, merge_gate, spec, lengths, state)
    for name, given, size in (
        ("norm_weight", norm_weight, q.shape[3]),
        ("norm_bias", norm_bias, q.shape[3]),
        ("front_temperature", front_temperature, q.shape[2]),
        ("state_temperature", state_temperature, q.shape[2]),
        ("state_bias", state_bias, q.shape[2]),
    ):
        if given is not None and given.shape != (size,):
            raise LayerError(f"{name} is {tuple(given.shape)}, for q {tuple(q.shape)}: it must be ({size},)")
    q, k, v = same_dtype(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    front, back, own_bias = (
        None if t is None else t.to(wide)[:, None] for t in (front_temperature, state_temperature, state_bias)
    )
    norm = Norm(norm_weight.to(wide), norm_bias.to(wide))
    call = _Call(spec, norm, front, back, own_bias, routes, want_routes, want_margins, statistics)
    tokens = _tokens(k, v, merge_gate, spec)
    with torch.autocast(q.device.type, enabled=False):
        if lengths:
            y, made = _packed(call, q, tokens, lengths)
            return y, None, made
        start = KVMState.empty(k, tokens.gate is not None) if state is None else state.take()
        return _sequences(call, q, tokens, start, want_state)


def advance_state(
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor | None,
    *,
    spec: KVMSpec,
    state: KVMState,
    norm_weight: Tensor,
    norm_bias: Tensor,
    routes: Routes | None = None,
) -> tuple[KVMState, Routes]:
    """Take tokens into a state without attending; arguments and results are those of `kvm_attention`."""
    wide = torch.promote_types(k.dtype, torch.float32)
    call = _Call(spec, Norm(norm_weight.to(wide), norm_bias.to(wide)), replay=routes)
    with torch.autocast(k.device.type, enabled=False):
        _, after, made = _sequences(call, None, _tokens(k, v, merge_gate, spec), state.take(), True)
    assert after is not None
    assert made is not None
    return after, made


def _tokens(k: Tensor, v: Tensor, gate: Tensor | None, spec: KVMSpec) -> Tokens:
    wide = torch.promote_types(k.dtype, torch.float32)
    return Tokens(k, v, gate.to(wide) if gate is not None and spec.gated else None)


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


@dataclass(frozen=True)
class _Call:
    """Settings of one call."""

    spec: KVMSpec
    norm: Norm
    front: Tensor | None = None
    back: Tensor | None = None
    bias: Tensor | None = None
    replay: Routes | None = None
    routes: bool = True
    margins: bool = False
    statistics: dict[str, Tensor] | None = None

    def groups(self, grid: ChunkGrid, steps: list[Update], k: Tensor) -> list[Group]:
        """Plan the walk over a grid, on keys like `k` `[B, T, G, D]`."""
        at_once = None if choose_walk(k, self.margins) == "chunks" else (k.shape[2], k.shape[3])
        return groups(self.spec, grid.spans, tuple(steps), k.device, at_once)

    def note(self, lengths: Sequence[int], found: Walked | None, grid: ChunkGrid | None) -> None:
        """Leave statistics of sequences of these lengths; `found`: None where nobody reads slots."""
        if self.statistics is None:
            return
        slots, tokens = (
            sum(map(count, lengths)) / len(lengths) for count in (self.spec.slots_at, self.spec.coverage)
        )
        mass = torch.zeros(1, device=self.norm.weight.device)
        if found is not None and found.window is not None:
            mass = (1 - torch.exp(found.window - found.lse)).transpose(1, 2)
        self.statistics["slots"] = torch.tensor(float(slots))
        self.statistics["tokens_per_slot"] = torch.tensor(tokens / slots)
        self.statistics["state_mass"] = (mass if grid is None else grid.tokens_of(mass)).mean()


def _walked(
    call: _Call, plan: list[Group], q: Tensor, tokens: Tokens, before: KVMState, starts: list[tuple[int, int]]
) -> tuple[Walked, Sums, Slots]:
    """Walk through rows of queries and of keys, from the slots of a state on.

    `starts`: where in given routes each sequence's tokens start. Returns the sums and slots after it, too.
    """
    replay = None if call.replay is None else Replay(call.replay, starts)
    walks = choose_walk(tokens.k, call.margins)
    whole = Plan(
        call.spec, 1 / math.sqrt(q.shape[-1]), choose(q), walks, plan, replay, call.margins,
        call.statistics is not None,
    )  # fmt: skip
    inputs = Inputs(q, *tokens, call.front, call.back, *call.norm, call.bias)
    room = plan[-1].slots if plan[-1].steps is None else None
    slots = before.slots_for(room, call.norm, call.spec, tokens.k.dtype)
    if not torch.is_grad_enabled():
        return walk(whole, inputs, slots), slots.used(), slots
    y, slot, founds, margin, window, lse, *sums = Walk.apply(whole, slots, *inputs, *before.sums())
    return Walked(y, Choice(slot, founds, margin), window, lse, None), Sums(*sums), slots


def _sequences(
    call: _Call, q: Tensor | None, new: Tokens, state: KVMState, want_state: bool
) -> tuple[Tensor, KVMState | None, Routes | None]:
    """Walk through equal sequences, which go on from `state`; q None: without attending."""
    spec, position = call.spec, state.position
    batch, count = new.k.shape[:2]
    end = position + count
    within = position % spec.chunk + count <= spec.chunk
    tokens = state.followed_by(new, in_place=within)
    grid, before, rows = None, state, tokens
    if within:
        plan = [within_chunk(spec, batch, position, count, state.slots)]
    else:
        grid = ChunkGrid.equal(batch, count, spec.chunk, position, state.held // spec.chunk)
        first = spec.window_start(position) // spec.chunk
        if first == 0 and position:
            # The window still holds the first chunk: the initial state is made again from there.
            before = KVMState.empty(new.k, spec.gated)
        steps = updates(spec, [grid.spans[0].end - 1 - spec.window_chunks] * batch, first, before.slots)
        plan, rows = call.groups(grid, steps, new.k), tokens.map(grid.keys)
        q = None if q is None else grid.queries(q)
    if q is None:
        plan = [group.without_queries() for group in plan]
    q_rows = rows.k[:0] if q is None else q
    found, sums, slots = _walked(call, plan, q_rows, rows, before, [(b, 0) for b in range(batch)])
    y, choice = found.y, found.choice
    if grid is not None:
        y = y if q is None else grid.tokens_of(y)
        if call.routes:
            choice = in_time(choice, steps, range(batch), spec.coverage(position) - first * spec.chunk)
    routes = as_routes(choice, spec.coverage(position)) if call.routes else None
    call.note([end], found, grid)
    if not want_state:
        return y, None, routes
    kept = end - spec.window_start(end)
    after = KVMState(end, slots.count, kept, *sums, *state.last_tokens(tokens, kept))
    if not torch.is_grad_enabled():
        after._slots, after._window = slots, state._window
    return y, after, routes


def _packed(call: _Call, q: Tensor, tokens: Tokens, lengths: Sequence[int]) -> tuple[Tensor, Routes | None]:
    """Documents longer than their window share a grid; the others are plain causal attention."""
    spec, every = call.spec, range(len(lengths))
    covered = [spec.coverage(length) for length in lengths]
    long = [i for i in every if lengths[i] > spec.window_chunks * spec.chunk]
    long.sort(key=lambda i: -(-lengths[i] // spec.chunk), reverse=True)
    y: dict[int, Tensor] = {}
    made: dict[int, Routes] = {}
    found = grid = None
    if long:
        own_lengths = [lengths[i] for i in long]
        grid = ChunkGrid.packed([sum(lengths[:i]) for i in long], own_lengths, spec.chunk, q.device)
        steps = updates(spec, [span.end - 1 - spec.window_chunks for span in grid.spans])
        empty = KVMState.empty(tokens.k.expand(len(long), -1, -1, -1), spec.gated)
        plan, starts = call.groups(grid, steps, tokens.k), [(0, sum(covered[:i])) for i in long]
        found, _, _ = _walked(call, plan, grid.queries(q), tokens.map(grid.keys), empty, starts)
        y = dict(zip(long, grid.tokens_of(found.y).split(own_lengths, 1), strict=True))
        if call.routes:
            made = {i: as_routes(in_time(found.choice, steps, [place]), 0) for place, i in enumerate(long)}
    documents = zip(scaled(q, call.front).split(list(lengths), 1), tokens.split(lengths), strict=True)
    for i, (own_q, own) in enumerate(documents):
        if i not in y:
            y[i], _ = attention(own_q, own.k, own.v, causal=True)
            if call.routes:
                first = own.k[:, : covered[i]].detach().transpose(1, 2)
                made[i] = as_routes(first_slots(first, margins=call.margins), 0)
    call.note([lengths[i] for i in long or every], found, grid)
    out = torch.cat([y[i] for i in every], 1)
    return out, joined_routes([made[i] for i in every]) if call.routes else None
