"""KVM attention chunk by chunk, autograd through every update: the twin that benchmarks measure against.

Fast enough for that, and less general than `kvm_reference`: whole chunks, as many key/value heads as query
heads, values by radius, and the merge gate on merged keys and values only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.layers.kvm.spec import KVMSpec


def eager_kvm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merge_gate: Tensor,
    *,
    spec: KVMSpec,
    norm_weight: Tensor,
    norm_bias: Tensor,
    front_temperature: Tensor,
    state_temperature: Tensor,
) -> Tensor:
    """Attend as `kvm_attention` does; `[B, T, H, D]` throughout, T a multiple of the chunk."""
    assert q.shape == k.shape
    assert q.shape[1] % spec.chunk == 0

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, norm_weight.shape, norm_weight, norm_bias, 1e-5)

    prepared = norm(F.pad(k[..., spec.rotary_dim :], (spec.rotary_dim, 0)))
    queries, fresh, keys, values = (
        x.transpose(1, 2).split(spec.chunk, 2) for x in (q, prepared, k * front_temperature[:, None], v)
    )
    gates = merge_gate.transpose(1, 2)[..., None].split(spec.chunk, 2)
    state = _State(fresh[0], values[0], torch.linalg.vector_norm(values[0], dim=-1, keepdim=True))
    out, window = [], spec.window_chunks
    for c, queries_c in enumerate(queries):
        if c > window:
            grow = spec.growth(state.keys.shape[2], c - window) - state.keys.shape[2]
            leaving = fresh[c - window], values[c - window], gates[c - window]
            state = _updated(state, *leaving, grow, spec, norm)
        seen = slice(max(0, c + 1 - window), c + 1)
        k_c, v_c = [*keys[seen]], [*values[seen]]
        if c >= window:
            k_c.insert(0, norm(state.keys) * state_temperature[:, None, None])
            v_c.insert(0, F.normalize(state.values, dim=-1, eps=1e-12) * state.radius)
        out.append(_attend(queries_c, torch.cat(k_c, 2), torch.cat(v_c, 2)))
    return torch.cat(out, 2).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend from a chunk to slots, older chunks and, causally, itself."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(k.shape[2] - q.shape[2] + 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


@dataclass
class _State:
    keys: Tensor  # [B, H, S, D], sums
    values: Tensor  # [B, H, S, D], sums
    radius: Tensor  # [B, H, S, 1]


def _updated(
    state: _State,
    keys: Tensor,
    values: Tensor,
    gate: Tensor,
    grow: int,
    spec: KVMSpec,
    norm: Callable[[Tensor], Tensor],
) -> _State:
    """Return the state after a chunk `[B, H, C, D]` that adds `grow` slots."""
    size = keys.shape[-1]
    merged = torch.ones_like(gate, dtype=torch.bool)
    if grow:
        novelty = (keys @ norm(state.keys).mT).detach().amax(-1)
        founders = novelty.argsort(dim=-1, stable=True)[..., :grow].sort(-1).values[..., None]
        merged = merged.scatter(2, founders, False)
        new_keys, new_values = (x.gather(2, founders.expand(-1, -1, -1, size)) for x in (keys, values))
        radius = torch.linalg.vector_norm(new_values, dim=-1, keepdim=True)
        new = (new_keys, new_values, radius)
        old = (state.keys, state.values, state.radius)
        state = _State(*(torch.cat(pair, 2) for pair in zip(old, new, strict=True)))
    scores = (keys @ norm(state.keys).mT).detach()[..., spec.sinks :]
    slot = (spec.sinks + scores.argmax(-1, keepdim=True)).expand(-1, -1, -1, size)
    weight = gate * merged
    return _State(
        state.keys.scatter_add(2, slot, keys * weight),
        state.values.scatter_add(2, slot, values * weight),
        state.radius,
    )
