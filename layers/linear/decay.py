"""Initial decays of the state: rates and time steps (Mamba-2 paper's code)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEP_RANGE = (0.001, 0.1)
LEAST_STEP = 1e-4


def reset_decay_rate(a_log: Tensor, low: float, high: float) -> None:
    """Fill `a_log` with the logarithm of numbers drawn uniformly from `low` to `high`."""
    a_log.uniform_(low, high).clamp_(min=1e-6).log_()  # a rate of exactly 0 would have no logarithm


def reset_time_step(dt_bias: Tensor) -> None:
    """Fill `dt_bias` so that its softplus is log-uniform in STEP_RANGE."""
    low, high = (math.log(limit) for limit in STEP_RANGE)
    step = dt_bias.uniform_(low, high).exp_().clamp_(min=LEAST_STEP)
    dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
