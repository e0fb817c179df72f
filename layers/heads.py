"""Options that all softmax mixers share, and the head counts and sizes they come to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .errors import LayerError, is_count, is_number, require, require_counts, require_flags, require_positive
from .norms import NORMS
from .rope import STYLES


@dataclass
class ProjectionOptions:
    """Options that all softmax mixers share; values out of range raise LayerError."""

    num_heads: int | None = None
    """Query heads H. None: hidden_size / head_dim."""
    num_kv_heads: int | None = None
    """Key/value heads G, a divisor of num_heads; query head h reads head h // (H / G). None: num_heads."""
    head_dim: int | None = None
    """D. None: hidden_size / num_heads, or the paper's 128 where num_heads is None too."""
    rotary_dim: int | None = None
    """P, the leading features of each head that are rotated; even. None: the kind's own default."""
    rotary_base: float = 10000.0
    """Slowest rotation is about 1 / base radians a token."""
    rotary_style: str = "paper"
    """paper (interleaved pairs, inclusive exponents, turned by minus the angle) or standard (Llama)."""
    rotary_frequencies: list[float] | None = None
    """Radians per token of each rotated pair, rotary_dim / 2 of them. None: those of base and style."""
    rotary_scale: float = 1.0
    """Multiplies the rotated features (YaRN's attention factor)."""
    qk_norm: str = "layernorm"
    """Per-head norm of queries and keys: layernorm, rmsnorm or none."""
    qk_norm_eps: float = 1e-5
    token_shift: bool = True
    """Mix each projected q, k and v with the previous token's."""
    value_residual: bool = True
    """Gate values towards those of the first layer of the same kind."""
    qkv_bias: bool = False
    """Biases of the q, k and v projections."""

    def __post_init__(self) -> None:
        require_counts(self, "num_heads", "num_kv_heads", "head_dim", nullable=True)
        dim = self.rotary_dim
        even = dim is None or (is_count(dim, 0) and dim % 2 == 0)
        require(even, "rotary_dim", dim, "an even number, 0 or more, or null")
        for name in ("rotary_base", "rotary_scale", "qk_norm_eps"):
            require_positive(self, name)
        given = self.rotary_frequencies
        finite = given is None or all(is_number(one) and math.isfinite(one) for one in given)
        require(finite, "rotary_frequencies", given, "a list of finite numbers, or null")
        require(self.rotary_style in STYLES, "rotary_style", self.rotary_style, ", ".join(STYLES))
        require(self.qk_norm in (*NORMS, "none"), "qk_norm", self.qk_norm, ", ".join((*NORMS, "none")))
        require_flags(self, "token_shift", "value_residual", "qkv_bias")


class Heads(NamedTuple):
    """Head counts and sizes for one hidden size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int

    @classmethod
    def of(
        cls, options: ProjectionOptions, hidden_size: int, default_rotary_dim: Callable[[int], int]
    ) -> Heads:
        """Resolve the options for `hidden_size`; raise LayerError where they do not fit it.

        `default_rotary_dim`: D -> P where the options leave P open.
        """
        num_heads, head_dim = options.num_heads, options.head_dim
        if num_heads is None:
            head_dim = head_dim or 128
            if hidden_size % head_dim:
                raise LayerError(
                    f"num_heads is not given and hidden_size {hidden_size} is no multiple of head_dim "
                    f"{head_dim}; give num_heads, or a head_dim that divides hidden_size"
                )
            num_heads = hidden_size // head_dim
        if head_dim is None:
            if hidden_size % num_heads:
                raise LayerError(
                    f"hidden_size {hidden_size} is no multiple of num_heads {num_heads}; give head_dim as "
                    "well, or a num_heads that divides hidden_size"
                )
            head_dim = hidden_size // num_heads
        num_kv_heads = options.num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise LayerError(f"num_kv_heads is {num_kv_heads}; allowed: divisors of num_heads {num_heads}")
        rotary_dim = options.rotary_dim
        if rotary_dim is None:
            rotary_dim = default_rotary_dim(head_dim)
        if rotary_dim > head_dim:
            raise LayerError(f"rotary_dim is {rotary_dim}; allowed: even numbers up to head_dim {head_dim}")
        given = options.rotary_frequencies
        if given is not None and 2 * len(given) != rotary_dim:
            raise LayerError(
                f"rotary_frequencies has {len(given)} entries; rotary_dim {rotary_dim} has half as many"
            )
        return cls(num_heads, num_kv_heads, head_dim, rotary_dim)
