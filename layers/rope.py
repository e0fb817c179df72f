"""Rotary position embedding: the Key-Value Means paper's and the usual one of Llama-like models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .indices import on_device

STYLES = ("paper", "standard")


class Rotary(NamedTuple):
    """Tables of one call; apply them with `rotate`."""

    cos: Tensor  # [T, P / 2], fp32
    sin: Tensor
    style: str


def frequencies(rotary_dim: int, base: float, style: str, device: torch.device | None = None) -> Tensor:
    """Compute radians per token of each rotated pair `[P / 2]`, fp32.

    paper: base^(-i / (n - 1)) for the n pairs, so that the slowest turns by exactly 1 / base (upstream code);
    standard: base^(-i / n).
    """
    pairs = rotary_dim // 2
    steps = max(pairs - 1, 1) if style == "paper" else pairs
    exponent = torch.arange(pairs, dtype=torch.float32, device=device) / steps
    return torch.pow(float(base), -exponent)


def positions(
    tokens: int,
    start: int | Sequence[int] = 0,
    lengths: tuple[int, ...] = (),
    device: torch.device = torch.device("cpu"),
) -> Tensor:
    """List absolute positions `[T]` from `start`; in packed documents from 0 in each, or from each one's
    start."""
    if not lengths:
        assert isinstance(start, int)
        return torch.arange(start, start + tokens, device=device)
    starts = [0] * len(lengths) if isinstance(start, int) else start
    ranges = zip(starts, lengths, strict=True)
    return on_device(torch.cat([torch.arange(first, first + length) for first, length in ranges]), device)


def rotary(
    positions: Tensor,
    rotary_dim: int,
    base: float,
    style: str,
    given: Sequence[float] | None = None,
    scale: float = 1.0,
) -> Rotary:
    """Compute tables for integer `positions` `[T]`; angles are fp32 products of position and frequency.

    `given`: frequencies `[P / 2]` instead of those of base and style; `scale` multiplies cosine and sine.
    """
    if given is None:
        turns = frequencies(rotary_dim, base, style, positions.device)
    else:
        turns = on_device(torch.tensor(given, dtype=torch.float32), positions.device)
    angles = positions.float()[:, None] * turns
    cos, sin = angles.cos(), angles.sin()
    return Rotary(cos, sin, style) if scale == 1 else Rotary(cos * scale, sin * scale, style)


def rotate(x: Tensor, table: Rotary) -> Tensor:
    """Rotate the first P features of each head of `x` `[B, T, H, D]`; computed in fp32, given in x's dtype.

    paper: pairs (2i, 2i + 1) turn by minus the angle; standard: pairs (i, i + P / 2) turn by plus the angle.
    """
    rotary_dim = 2 * table.cos.shape[-1]
    if rotary_dim == 0:
        return x
    cos, sin = table.cos[:, None], table.sin[:, None]
    turned, rest = x.split((rotary_dim, x.shape[-1] - rotary_dim), -1)
    turned = turned.to(torch.promote_types(x.dtype, torch.float32))
    if table.style == "paper":  # as complex numbers, which is three times as fast as even and odd slices
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.complex(cos, -sin)).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
