"""Kimi Delta Attention: the gated delta rule with a decay for every key channel (Kimi Linear paper).

Parameter names are those of flash-linear-attention's layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import is_number, require
from .gated_deltanet import DeltaMixer, DeltaOptions
from .norms import compute_dtype
from .parameters import initialise, reset_decay_rate, reset_time_step
from .registry import register


@dataclass
class KimiDeltaOptions(DeltaOptions):
    """Options of Kimi Delta Attention; usual widths: keys and values hidden_size each, in heads of 128."""

    lower_bound: float | None = None
    """Log decays lie between this and 0, by a sigmoid (upstream code: -5). null: without bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bound = self.lower_bound
        allowed = bound is None or (is_number(bound) and -math.inf < bound < 0)
        require(allowed, "lower_bound", bound, "a number below 0, or null")


@register("kimi_delta")
class KimiDelta(DeltaMixer):
    """The gated delta rule with one decay per key channel; decay and gate through a head's width."""

    Options = KimiDeltaOptions
    kept_vectors = 32.0
    default_head_k_dim = 128
    key_share = (1, 1)
    value_ratio = 1

    def _build(self) -> None:
        size, rank, decays = self.site.hidden_size, self.head_v_dim, self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(nn.Linear(size, rank, bias=False), nn.Linear(rank, decays, bias=False))
        self.g_proj = nn.Sequential(
            nn.Linear(size, rank, bias=False), nn.Linear(rank, self.v_width, bias=True)
        )
        self.dt_bias = nn.Parameter(torch.empty(decays))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        initialise(self.A_log, lambda a: reset_decay_rate(a, 1, 16))
        initialise(self.dt_bias, reset_time_step)

    def log_decay(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        step = self.f_proj(x).to(dtype) + self.dt_bias.to(dtype)
        step = step.unflatten(-1, (self.num_v_heads, self.head_k_dim))
        rate = self.A_log.to(dtype).exp()[:, None]
        if self.options.lower_bound is not None:
            return self.options.lower_bound * torch.sigmoid(rate * step)
        return -rate * F.softplus(step)

    def gate(self, o: Tensor, x: Tensor) -> Tensor:
        return o * torch.sigmoid(self.g_proj(x).to(o.dtype)).unflatten(-1, o.shape[-2:])

    def gate_products(self) -> int:
        widths = 2 * self.site.hidden_size + self.num_v_heads * self.head_k_dim + self.v_width
        return self.head_v_dim * widths
