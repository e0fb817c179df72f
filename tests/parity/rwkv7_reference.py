"""RWKV-7's time mix token by token, from its definition; nothing of the package's layers.

Given the mixer's parameters by name, in their own dtype (float64 for references).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .linear_reference import each_token


def recurrence(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`S_t = (diag(exp l_t) + b_t a_t^T) S_{t-1} + k_t v_t^T, o_t = S_t^T r_t` with S `[B, H, K, V]`.

    Inputs `[B, T, H, K or V]`; `state` is S at the start (None: zero), and the one returned S at the end.
    """
    S = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]) if state is None else state
    columns = (log_decay.exp()[..., None], k[..., None], b[..., None])
    rows = (x[..., None, :] for x in (r, v, a))
    outs = []
    for decay_t, k_t, b_t, r_t, v_t, a_t in each_token(*columns, *rows):
        S = decay_t * S + b_t @ (a_t @ S) + k_t @ v_t
        outs.append(r_t @ S)
    return torch.cat(outs, -2).transpose(1, 2), S


class Result(NamedTuple):
    y: Tensor
    recurrent: Tensor
    value: Tensor  # the layer's own values before the residual, `[B, T, C]`


def reference(
    x: Tensor,
    p: Mapping[str, Tensor],
    heads: int,
    v_first: Tensor | None = None,
    shift: Tensor | None = None,
    state: Tensor | None = None,
) -> Result:
    """The whole layer on `x` `[B, T, C]`; `v_first` None: its own values (or no residual at all).

    Args:
        shift: the token before the first `[B, C]`; None: zero.
        state: `[B, H, n, n]`, key index first; None: zero.
    """
    width = x.shape[2] // heads
    shift = torch.zeros_like(x[:, 0]) if shift is None else shift
    rows, before = [], shift
    for t in range(x.shape[1]):
        rows.append(_token(x[:, t], before, p))
        before = x[:, t]
    r, z, k0, value, change, alpha, gate = (torch.stack(part, 1) for part in zip(*rows, strict=True))
    v = value if v_first is None else value + (v_first - value) * change

    def split(t: Tensor) -> Tensor:
        return t.unflatten(-1, (heads, width))

    log_decay = -torch.exp(-torch.log1p(torch.exp(-z)) - 0.5)
    kappa = split(k0 * p["k_k"].flatten())
    kappa = kappa / kappa.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
    k = split(k0 * (1 + (alpha - 1) * p["k_a"].flatten()))
    r, v, alpha = split(r), split(v), split(alpha)
    o, state = recurrence(r, split(log_decay), k, v, -kappa, kappa * alpha, state)
    mean = o.mean(-1, keepdim=True)
    normed = (o - mean) / ((o - mean).square().mean(-1, keepdim=True) + 64e-5).sqrt()
    normed = normed.flatten(-2) * p["ln_x.weight"] + p["ln_x.bias"]
    bonus = (r * k * p["r_k"].view(heads, width)).sum(-1, keepdim=True) * v
    y = ((normed + bonus.flatten(-2)) * gate) @ p["output.weight"].T
    return Result(y, state, value)


def _token(x: Tensor, before: Tensor, p: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """r, decay before its squashing, k0, value, value gate, alpha and output gate of one token `[B, C]`."""

    def stream(name: str) -> Tensor:
        return x + (before - x) * p[f"x_{name}"].flatten() if "x_r" in p else x

    def low_rank(name: str, inner=lambda t: t) -> Tensor:
        return inner(stream(name) @ p[f"{name}1.weight"].T) @ p[f"{name}2.weight"].T

    r, k0, value = (
        stream(name) @ p[f"{full}.weight"].T
        for name, full in (("r", "receptance"), ("k", "key"), ("v", "value"))
    )
    z = p["w0"].flatten() + low_rank("w", torch.tanh)
    change = torch.sigmoid(p["v0"].flatten() + low_rank("v")) if "v0" in p else torch.zeros_like(value)
    alpha = torch.sigmoid(p["a0"].flatten() + low_rank("a"))
    return r, z, k0, value, change, alpha, low_rank("g", torch.sigmoid)
