"""The linear recurrences token by token, autograd through every step: what their chunked forms are measured
against. Arguments and outputs as of the operators, without state, packing or fewer key heads."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """As `gated_delta_rule`; q, k `[B, T, H, K]`, v `[B, T, H, V]`, g `[B, T, H]` or `[B, T, H, K]`."""
    decay = (g if g.ndim == q.ndim else g[..., None]).exp()[..., None]
    rows = (x[..., None, :] for x in (q * q.shape[-1] ** -0.5, k, v))
    tokens = (x.unbind(1) for x in (*rows, decay, beta[..., None, None]))
    state, outs = v.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for q_t, k_t, v_t, decay_t, beta_t in zip(*tokens, strict=True):
        state = state * decay_t
        state = state + k_t.mT @ (beta_t * (v_t - k_t @ state))
        outs.append(q_t @ state)
    return torch.cat(outs, -2).transpose(1, 2)


def rwkv7_steps(r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As `rwkv7_recurrence`; `[B, T, H, K]` throughout."""
    columns = (log_decay.exp()[..., None], k[..., None], b[..., None])
    rows = (x[..., None, :] for x in (r, v, a))
    tokens = (x.unbind(1) for x in (*columns, *rows))
    state, outs = v.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1]), []
    for decay_t, k_t, b_t, r_t, v_t, a_t in zip(*tokens, strict=True):
        state = decay_t * state + b_t @ (a_t @ state) + k_t @ v_t
        outs.append(r_t @ state)
    return torch.cat(outs, -2).transpose(1, 2)


def ssd_steps(x: Tensor, b: Tensor, c: Tensor, g: Tensor) -> Tensor:
    """As `ssd`; x `[B, T, H, P]`, b, c `[B, T, 1, N]`, g `[B, T, H]`."""
    tokens = (z.unbind(1) for z in (x[..., None], b[..., None, :], c[..., None], g.exp()[..., None, None]))
    state, outs = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1]), []
    for x_t, b_t, c_t, decay_t in zip(*tokens, strict=True):
        state = decay_t * state + x_t @ b_t
        outs.append(state @ c_t)
    return torch.stack([out.squeeze(-1) for out in outs], 1)
