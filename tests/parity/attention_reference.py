"""Stepwise twins of the softmax mixers: one token, one head, one key at a time, in the inputs' dtype.

Written from the definitions only; they share no code with the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def visible_keys(kind: str, position: int, options) -> list[int]:
    """The keys that the query at `position` sees, by the definition of each kind."""
    seen = range(position + 1)
    if kind == "full":
        return list(seen)
    if kind == "sliding_window":
        return [j for j in seen if position - j < options.window]
    assert kind == "block_window"
    oldest = position // options.chunk - options.window_chunks + 1
    return [j for j in seen if j // options.chunk >= oldest or j < options.sinks]


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Callable[[int], list[int]]) -> Tensor:
    """`q` `[B, T, H, D]`, `k` `v` `[B, T, G, D]` -> `[B, T, H, D]`, query after query."""
    group = q.shape[2] // k.shape[2]
    rows = []
    for t in range(q.shape[1]):
        keys = visible(t)
        heads = []
        for h in range(q.shape[2]):
            g = h // group
            logits = (k[:, keys, g] * q[:, t, h, None]).sum(-1) / math.sqrt(q.shape[-1])
            heads.append((logits.softmax(-1)[..., None] * v[:, keys, g]).sum(1))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows, 1)


def rotate_paper(x: Tensor, rotary_dim: int, base: float) -> Tensor:
    """`x` `[B, T, H, D]` from position 0: pair i of n turns by -t * base^(-i / (n - 1))."""
    x = x.clone()
    pairs = rotary_dim // 2
    for i in range(pairs):
        frequency = base ** (-i / (pairs - 1)) if pairs > 1 else 1.0
        for t in range(x.shape[1]):
            c, s = math.cos(t * frequency), math.sin(t * frequency)
            even, odd = x[:, t, :, 2 * i].clone(), x[:, t, :, 2 * i + 1].clone()
            x[:, t, :, 2 * i] = even * c + odd * s
            x[:, t, :, 2 * i + 1] = odd * c - even * s
    return x


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * weight + bias


def _shift(x: Tensor, mix: Tensor) -> Tensor:
    rows = [x[:, 0]]
    for t in range(1, x.shape[1]):
        rows.append(x[:, t] + mix * (x[:, t - 1] - x[:, t]))
    return torch.stack(rows, 1)


def project(mixer, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[B, T, heads, D]` as the paper has them (options of the paper only).

    `first` `[B, T, G * D]`: shared values of the kind's first layer, None in that layer itself.
    """
    p = dict(mixer.named_parameters())
    q, k, v = (x @ p[f"{name}.weight"].t() for name in ("c_q", "c_k", "c_v"))
    if first is not None:
        gate = torch.sigmoid(p["v_gate0"] + x @ p["v_gate1.weight"].t() @ p["v_gate2.weight"].t())
        v = v + (first - v) * gate
    q, k, v = _shift(q, p["x_q"]), _shift(k, p["x_k"]), _shift(v, p["x_v"])
    q, k, v = (z.reshape(*z.shape[:2], -1, mixer.head_dim) for z in (q, k, v))
    q = _layer_norm(q, p["ln_q.weight"], p["ln_q.bias"])
    k = _layer_norm(k, p["ln_k.weight"], p["ln_k.bias"])
    base = mixer.options.rotary_base
    return rotate_paper(q, mixer.rotary_dim, base), rotate_paper(k, mixer.rotary_dim, base), v


def mix(mixer, x: Tensor, first: Tensor | None = None) -> Tensor:
    """What a full, sliding_window or block_window `mixer` does to `x` `[B, T, C]` from the start."""
    q, k, v = project(mixer, x, first)
    y = attend(q, k, v, lambda t: visible_keys(mixer.kind, t, mixer.options))
    return y.flatten(2) @ mixer.c_proj.weight.t()
