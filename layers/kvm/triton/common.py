"""What the kernels share: precision, constants of reading, LayerNorm."""

from __future__ import annotations

import triton
import triton.language as tl

from ..contributions import EPSILON, TINY

PRECISION = tl.constexpr("ieee")
"""Precision of products: routes must be those of the torch path, so not TF32. "tf32x3" compiles, too; it uses
tensor cores and is nearly as exact."""
EPS = tl.constexpr(EPSILON)
SHORTEST = tl.constexpr(TINY)


def padded(size: int, least: int = 16) -> int:
    """Round up to a power of two, as blocks must be; `tl.dot` needs at least 16."""
    return max(least, triton.next_power_of_2(size))


@triton.jit
def standardised(x, valid, size: tl.constexpr):
    """Bring the `size` valid entries of rows `[S, D]` to mean 0 and variance 1; also return the factors."""
    centred = tl.where(valid, x - tl.sum(x, 1)[:, None] / size, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / size + EPS)[:, None]
    return centred * factor, factor
