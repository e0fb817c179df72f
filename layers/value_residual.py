"""Value residual: layers of one kind pull their values towards those of the first such layer.

`v + (v_first - v) * sigmoid(gate0 + W2 W1 x)`, the mode "rwkv" of the paper's code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import Mixer
from .context import Context
from .errors import LayerError


def gate_rank(hidden_size: int) -> int:
    """Choose the width between W1 and W2: 1.3 * sqrt(hidden), to a multiple of 32, at least 32."""
    return max(32, round(1.3 * math.sqrt(hidden_size) / 32) * 32)


def mix_values(v: Tensor, first: Tensor, gate0: Tensor, gate: Tensor) -> Tensor:
    """Compute values `[B, T, W]` after the residual; `gate` `[B, T, W]` is W2 W1 x, `gate0` `[W]` its
    bias."""
    return torch.lerp(v, first.to(v.dtype), torch.sigmoid(gate + gate0).to(v.dtype))


def first_values(layer: Mixer, width: int, context: Context) -> Tensor:
    """Read the values that the first layer of `layer`'s kind shares, `[B, T, width]`; raise LayerError where
    they are missing or of another width."""
    kind, index = layer.kind, layer.site.layer
    first = context.first_values.get(kind)
    if first is None:
        raise LayerError(
            f"layer {index} ({kind}) needs the first {kind} layer's values in context.first_values; run that "
            "layer before it with the same context, or build it with first_of_kind, or with "
            "value_residual off"
        )
    if first.shape[-1] != width:
        raise LayerError(
            f"layer {index} ({kind}) has values of width {width}, but the first {kind} layer shares values "
            f"of width {first.shape[-1]}: the value residual needs equal num_kv_heads * head_dim, or "
            "value_residual off in one of the two"
        )
    return first


def reset_gate0(gate0: Tensor) -> None:
    """Fill with a ramp 0.93 ... 0.53 (before the sigmoid) over the features (upstream code)."""
    width = gate0.numel()
    i = torch.arange(width, dtype=gate0.dtype, device=gate0.device)
    gate0.copy_(0.73 - 0.4 * (i / max(width - 1, 1) - 0.5))


def reset_gate2(weight: Tensor) -> None:
    """Fill W2 `[W, rank]` with orthogonal rows with gain 0.1, times sqrt(rank / W) where rank > W (upstream
    code)."""
    width, rank = weight.shape
    value = torch.empty(rank, width, dtype=weight.dtype, device=weight.device)
    nn.init.orthogonal_(value, gain=0.1 * max(1.0, math.sqrt(rank / width)))
    weight.copy_(value.t())
