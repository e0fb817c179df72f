"""Normalisations that compute in fp32 whatever the dtype of input and parameters (float64 stays float64)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import LayerError
from .parameters import initialise


class Norm(nn.Module):
    """Normalise the last axis of `[..., size]`; the result has the input's dtype."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self._build()
        self.reset_parameters()

    def _build(self) -> None:
        """Make further parameters."""

    def reset_parameters(self) -> None:
        initialise(self.weight, nn.init.ones_)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class LayerNorm(Norm):
    """Remove mean and biased variance, then weight and bias."""

    def _build(self) -> None:
        self.bias = nn.Parameter(torch.empty(self.size))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        initialise(self.bias, nn.init.zeros_)

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), (self.size,), weight, bias, self.eps).to(x.dtype)


class RMSNorm(Norm):
    """Divide by the root mean square (eps inside the root), then weight."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        return F.rms_norm(x.to(dtype), (self.size,), self.weight.to(dtype), self.eps).to(x.dtype)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Give the dtype to compute in: fp32, or float64 for a float64 `x`."""
    return torch.promote_types(x.dtype, torch.float32)


NORMS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(kind: str, size: int, eps: float = 1e-5) -> Norm:
    """Make a `layernorm` or `rmsnorm` over `size` features; raise LayerError for another kind."""
    if kind not in NORMS:
        raise LayerError(f"norm '{kind}': allowed are {', '.join(NORMS)}")
    return NORMS[kind](size, eps)
