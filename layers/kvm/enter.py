"""Tokens that enter a carried state chunk by chunk: decoding, and reading without attending.

Long calls go through `chunks` instead, which works on many chunks at once.

Shapes: B sequences, T tokens, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .chunks import Call, decide
from .contributions import Norm, contributions, prepare
from .routing import Routes, as_routes, first_slots, joined_routes
from .spec import KVMSpec, Update
from .state import KVMState


def read_on(
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    *,
    spec: KVMSpec,
    state: KVMState,
    norm_weight: Tensor,
    norm_bias: Tensor,
    routes: Routes | None = None,
) -> tuple[KVMState, Routes]:
    """The state after more tokens, and the decisions made, as `kvm_attention` has them, without attending.

    Arguments are those of `kvm_attention`.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    gate = gate.to(wide) if gate is not None and spec.gated else None
    norm = Norm(norm_weight.to(wide), norm_bias.to(wide))
    call = Call(spec, norm, 1.0, routes, False, None)
    state, tokens, made = taken(state, k), k.shape[1], []
    room = spec.chunk - state.position % spec.chunk
    cuts = [min(room, tokens), *[spec.chunk] * ((tokens - room) // spec.chunk)]
    if rest := tokens - sum(cuts):
        cuts.append(rest)
    gates = [None] * len(cuts) if gate is None else gate.split(cuts, 1)
    with torch.autocast(k.device.type, enabled=False):
        for piece in zip(k.split(cuts, 1), v.split(cuts, 1), gates, strict=True):
            made.append(enter(call, state, *piece))
    return state, joined_routes(made)


def taken(state: KVMState, k: Tensor) -> KVMState:
    """A state whose fields a call with keys like `k` may replace, with a window in their dtype."""
    own = replace(state.take())
    if torch.is_grad_enabled():
        own._owned = frozenset()
    for name in ("window_k", "window_v"):
        held = getattr(own, name)
        if held.dtype != k.dtype:
            setattr(own, name, held.to(k.dtype))
            own._owned -= {name}
    return own


def enter(call: Call, state: KVMState, k: Tensor, v: Tensor, gate: Tensor | None) -> Routes:
    """Take tokens of one chunk into the state: first what leaves the window for them, then themselves."""
    spec, position = call.spec, state.position
    nothing = first_slots(k.new_empty(k.shape[0], k.shape[2], 0, 1), margins=call.margins)
    made = as_routes(nothing, spec.coverage(position))
    number = position // spec.chunk - spec.window_chunks
    if position % spec.chunk == 0 and number >= 0:
        if number > 0:
            made = _update(call, state, number)
        state.drop(spec.chunk)
    if position < spec.chunk:
        made = _found(call, state, k, v, gate)
    state.push(k, v, gate)
    return made


def _update(call: Call, state: KVMState, number: int) -> Routes:
    """Absorb the window's first chunk."""
    spec = call.spec
    k, v, gate = state.oldest(spec.chunk)
    keys = prepare(k, spec.rotary_dim, call.norm).transpose(1, 2)
    values, gate = v.transpose(1, 2), None if gate is None else gate.transpose(1, 2)
    step = Update(number, k.shape[0], state.slots, spec.growth(state.slots, number))
    starts = [(b, 0) for b in range(k.shape[0])]
    choice = decide(call, starts, keys, gate, call.norm(state.sums().keys), step)
    added = contributions(keys, values, gate, choice.founds, [step], spec)
    state.absorb(added, choice.slot, step, spec)
    return as_routes(choice, number * spec.chunk)


def _found(call: Call, state: KVMState, k: Tensor, v: Tensor, gate: Tensor | None) -> Routes:
    """The first chunk's tokens are slots from the start."""
    keys = prepare(k, call.spec.rotary_dim, call.norm).transpose(1, 2)
    values, gate = v.transpose(1, 2), None if gate is None else gate.transpose(1, 2)
    choice = first_slots(keys, state.position, call.margins)
    step = Update(0, k.shape[0], 0, call.spec.chunk)
    state.found(contributions(keys, values, gate, choice.founds, [step], call.spec))
    return as_routes(choice, state.position)
