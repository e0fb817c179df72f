"""Stepwise twins of the linear mixers: token by token in the inputs' dtype, autograd through every step.

Written from the definitions only; they share no code with the layers. The benchmarks measure against them, so
a step is a few matrix products over all heads. States have the key index first,
`[B, HV, K, V]`, except Mamba-2's, `[B, H, P, N]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
State = dict[str, Tensor]


def delta_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`S <- diag(e^g) S;  S <- S + beta k (v - k^T S)^T;  o = S^T q / sqrt(K)`, with S `[K, V]`.

    q, k `[B, T, H, K]`, v `[B, T, HV, V]`, g `[B, T, HV]` or `[B, T, HV, K]`, beta `[B, T, HV]`.
    """
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if state is None else state
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q * k.shape[3] ** -0.5, k))
    decay = (g if g.ndim == k.ndim else g[..., None]).exp()[..., None]
    rows = (x[..., None, :] for x in (q, k, v))
    outs = []
    for q_t, k_t, v_t, decay_t, beta_t in each_token(*rows, decay, beta[..., None, None]):
        S = S * decay_t
        S = S + k_t.mT @ (beta_t * (v_t - k_t @ S))
        outs.append(q_t @ S)
    return torch.cat(outs, -2).transpose(1, 2), S


def ssd_steps(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`S <- e^g S + x B^T;  o = S C`; x `[B, T, H, P]`, b and c `[B, T, G, N]`, g `[B, T, H]`."""
    S = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3]) if state is None else state
    b, c = (z.repeat_interleave(x.shape[2] // z.shape[2], 2) for z in (b, c))
    outs = []
    for x_t, b_t, c_t, decay_t in each_token(
        x[..., None], b[..., None, :], c[..., None], g.exp()[..., None, None]
    ):
        S = decay_t * S + x_t @ b_t
        outs.append((S @ c_t)[..., 0])
    return torch.stack(outs, 1), S


def each_token(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Go through the tokens of tensors `[B, T, ...]`."""
    yield from zip(*(x.unbind(1) for x in tensors), strict=True)


def convolve(u: Tensor, weight: Tensor, bias: Tensor | None, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """SiLU of the causal convolution of `u` `[B, T, channels]`, and its last W inputs `[B, channels, W]`."""
    width = weight.shape[-1]
    before = u.new_zeros(u.shape[0], width, u.shape[2]) if last is None else last.transpose(1, 2)
    every = torch.cat((before, u), 1)
    outs = []
    for t in range(u.shape[1]):
        seen = every[:, t + 1 : t + 1 + width]
        y = (seen * weight[:, 0].t()).sum(1)
        outs.append(F.silu(y if bias is None else y + bias))
    return torch.stack(outs, 1), every[:, -width:].transpose(1, 2)


def delta_layer(kind: str, weights: Weights, options: Any, x: Tensor, state: State | None = None):
    """Gated DeltaNet or Kimi Delta Attention: y `[B, T, C]` and the next state by field name."""
    state, after = state or {}, {}
    parts = {}
    for name in ("q", "k", "v"):
        u = x @ weights[f"{name}_proj.weight"].t()
        if options.use_short_conv:
            conv = f"{name}_conv1d"
            weight, bias = weights[f"{conv}.weight"], weights.get(f"{conv}.bias")
            parts[name], after[f"conv_{name}"] = convolve(u, weight, bias, state.get(f"conv_{name}"))
        else:
            parts[name] = F.silu(u)
    beta = torch.sigmoid(x @ weights["b_proj.weight"].t()) * (2 if options.allow_neg_eigval else 1)
    heads, key_width = options.num_heads, options.head_k_dim
    value_heads = beta.shape[-1]
    q, k = (parts[n].unflatten(-1, (heads, key_width)) for n in "qk")
    q, k = (z / torch.sqrt(z.square().sum(-1, keepdim=True) + 1e-6) for z in (q, k))
    v = parts["v"].unflatten(-1, (value_heads, -1))
    rate = torch.exp(weights["A_log"])
    if kind == "gated_deltanet":
        g = -rate * F.softplus(x @ weights["a_proj.weight"].t() + weights["dt_bias"])
    else:
        step = x @ weights["f_proj.0.weight"].t() @ weights["f_proj.1.weight"].t() + weights["dt_bias"]
        step = step.unflatten(-1, (value_heads, key_width))
        g = -rate[:, None] * F.softplus(step)
        if options.lower_bound is not None:
            g = options.lower_bound * torch.sigmoid(rate[:, None] * step)
    o, after["recurrent"] = delta_steps(q, k, v, g, beta, state.get("recurrent"))
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + options.norm_eps) * weights["o_norm.weight"]
    if kind == "kimi_delta":
        gate = x @ weights["g_proj.0.weight"].t() @ weights["g_proj.1.weight"].t() + weights["g_proj.1.bias"]
        o = o * torch.sigmoid(gate).unflatten(-1, o.shape[-2:])
    elif options.use_gate:
        o = o * F.silu(x @ weights["g_proj.weight"].t()).unflatten(-1, o.shape[-2:])
    return o.flatten(-2) @ weights["o_proj.weight"].t(), after


def mamba2_layer(weights: Weights, options: Any, x: Tensor, state: State | None = None):
    """Mamba-2: y `[B, T, C]` and the next state by field name."""
    state, after = state or {}, {}
    inner, group = options.expand * x.shape[-1], options.n_groups * options.state_size
    heads = weights["D"].numel()
    z, u, dt = (x @ weights["in_proj.weight"].t()).split((inner, inner + 2 * group, heads), -1)
    weight, bias = weights["conv1d.weight"], weights.get("conv1d.bias")
    mixed, after["conv"] = convolve(u, weight, bias, state.get("conv"))
    values, b, c = mixed.split((inner, group, group), -1)
    values = values.unflatten(-1, (heads, -1))
    b, c = (w.unflatten(-1, (options.n_groups, -1)) for w in (b, c))
    step = F.softplus(dt + weights["dt_bias"])
    g = -torch.exp(weights["A_log"]) * step
    o, after["recurrent"] = ssd_steps(step[..., None] * values, b, c, g, state.get("recurrent"))
    o = (o + weights["D"][:, None] * values).flatten(-2) * F.silu(z)
    o = o.unflatten(-1, (options.n_groups, -1))
    o = o / torch.sqrt(o.square().mean(-1, keepdim=True) + options.norm_eps)
    return (o.flatten(-2) * weights["norm.weight"]) @ weights["out_proj.weight"].t(), after
