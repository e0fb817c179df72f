"""Mamba-2: a gated state space layer (Mamba-2 paper; parameter names of its code)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Flops, Site
from .context import Context
from .errors import LayerError, require, require_counts, require_flags, require_positive
from .linear.across import DecayAcrossRanks
from .linear.mixer import RecurrentMixer
from .linear.short_conv import ShortConv, last_of_rank, refuse_short_chunks
from .linear.ssd import ssd
from .norms import Norm, compute_dtype
from .parameters import initialise, reset_decay_rate, reset_time_step, reset_uniform
from .registry import register
from .state import MixerState

SSD = DecayAcrossRanks(ssd)


@dataclass
class Mamba2Options:
    """Options of the Mamba-2 mixer; values out of range raise LayerError."""

    expand: int = 2
    """Inner width, in hidden sizes."""
    num_heads: int | None = None
    """H. None: inner width / head_dim."""
    head_dim: int | None = None
    """P. None: inner width / num_heads, or 64 without that too."""
    state_size: int = 128
    """N, numbers that the state keeps for each of a head's channels."""
    n_groups: int = 1
    """G, a divisor of the heads; head h reads and writes the state through group h // (H / G)."""
    conv_size: int = 4
    """Tokens that the convolution sees, the current one included."""
    conv_bias: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_counts(self, "expand", "state_size", "n_groups", "conv_size")
        require_counts(self, "num_heads", "head_dim", nullable=True)
        require_flags(self, "conv_bias")
        require_positive(self, "norm_eps")


class Mamba2Heads(NamedTuple):
    """Head count and size for one hidden size."""

    num_heads: int
    head_dim: int


@dataclass
class Mamba2State(MixerState):
    """State of the recurrence, and the short convolution's last inputs (oldest first)."""

    recurrent: Tensor | None = None  # [B, H, P, N], at least fp32
    conv: Tensor | None = None  # [B, expand * C + 2 * G * N, conv_size]


class GroupRMSNorm(Norm):
    """Divide every group of features by its own root mean square (eps inside the root), then weight."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        self.groups = groups
        super().__init__(size, eps)

    def forward(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        grouped = x.to(dtype).unflatten(-1, (self.groups, -1))
        normal = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2)
        return (normal * self.weight.to(dtype)).to(x.dtype)


@register("mamba2")
class Mamba2(RecurrentMixer):
    """`S <- e^g S + (dt x) B^T;  o = S C + D x`, with g = -exp(A_log) dt."""

    Options = Mamba2Options
    kept_vectors = 48.0

    def __init__(self, options: Any, site: Site) -> None:
        super().__init__(options, site)
        self.num_heads, self.head_dim = self.heads(options, site.hidden_size)
        self.inner = options.expand * site.hidden_size
        self.group_width = options.n_groups * options.state_size
        self.conv_width = self.inner + 2 * self.group_width
        self.in_proj = nn.Linear(site.hidden_size, self.inner + self.conv_width + self.num_heads, bias=False)
        self.conv1d = ShortConv(self.conv_width, options.conv_size, options.conv_bias)
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.norm = GroupRMSNorm(self.inner, options.n_groups, options.norm_eps)
        self.out_proj = nn.Linear(self.inner, site.hidden_size, bias=False)
        self.reset_parameters()

    @classmethod
    def heads(cls, options: Any, hidden_size: int) -> Mamba2Heads:
        """Resolve head count and size for `hidden_size`; raise LayerError where the options do not fit it."""
        inner, heads, width = options.expand * hidden_size, options.num_heads, options.head_dim
        if heads is None:
            width = width or 64
            require(inner % width == 0, "head_dim", width, f"divisors of expand * hidden_size = {inner}")
            heads = inner // width
        if width is None:
            require(inner % heads == 0, "num_heads", heads, f"divisors of expand * hidden_size = {inner}")
            width = inner // heads
        if heads * width != inner:
            raise LayerError(
                f"num_heads is {heads} and head_dim {width}; allowed: any whose product is expand * "
                f"hidden_size = {inner}"
            )
        groups = options.n_groups
        require(heads % groups == 0, "n_groups", groups, f"divisors of the {heads} heads")
        return Mamba2Heads(heads, width)

    @classmethod
    def check(cls, options: Any, site: Site) -> None:
        cls.heads(options, site.hidden_size)

    @classmethod
    def check_sharding(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        """Refuse shards shorter than the convolution: ranks exchange states, and the tokens that the
        convolution sees."""
        refuse_short_chunks(f"layer {site.layer} ({cls.kind})", options.conv_size, size, tokens)

    def reset_parameters(self) -> None:
        """Initialise linear maps and the convolution as torch does."""
        reset_uniform(self.in_proj, self.in_proj.in_features)
        reset_uniform(self.out_proj, self.out_proj.in_features)
        self.conv1d.reset_parameters()
        self.norm.reset_parameters()
        initialise(self.A_log, lambda a: reset_decay_rate(a, 1, 16))
        initialise(self.D, nn.init.ones_)
        initialise(self.dt_bias, reset_time_step)

    def mix(
        self, x: Tensor, context: Context, state: Mamba2State | None
    ) -> tuple[Tensor, Mamba2State | None]:
        state = state or Mamba2State()
        z, u, dt = self.in_proj(x).split((self.inner, self.conv_width, self.num_heads), -1)
        if context.shard is not None:
            u, lasts = last_of_rank(context.shard, self.options.conv_size, u)
            state = Mamba2State(0, None, *lasts)
        mixed, conv = self.conv1d(u, state.conv, context.lengths)
        inner, b, c = mixed.split((self.inner, self.group_width, self.group_width), -1)
        wide = compute_dtype(x)
        step = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        g = -self.A_log.to(wide).exp() * step
        if context.statistics is not None:
            context.note(self.site.layer, decay=g.exp(), time_step=step)
        inner = inner.unflatten(-1, (self.num_heads, -1))
        groups = (self.options.n_groups, -1)
        o, recurrent = SSD(
            context,
            state.recurrent,
            u.dtype,
            x=step[..., None] * inner,
            b=b.unflatten(-1, groups),
            c=c.unflatten(-1, groups),
            g=g,
        )
        o = o.to(wide) + self.D.to(wide)[:, None] * inner
        gated = self.norm(o.flatten(-2) * F.silu(z.to(wide)))
        y = self.out_proj(gated.to(x.dtype)).to(x.dtype)
        if not context.want_state:
            return y, None
        return y, Mamba2State(state.position + x.shape[1], recurrent, conv)

    def empty_state(self, batch: int) -> Mamba2State:
        weight = self.out_proj.weight
        shape = (batch, self.num_heads, self.head_dim, self.options.state_size)
        recurrent = weight.new_zeros(shape, dtype=compute_dtype(weight))
        return Mamba2State(
            recurrent=recurrent, conv=weight.new_zeros(batch, self.conv_width, self.options.conv_size)
        )

    # The recurrence counts as one write and one read of the state.

    def flops_at(self, position: int) -> Flops:
        maps = self.site.hidden_size * (2 * self.inner + self.conv_width + self.num_heads)
        return Flops(2.0 * maps + 4.0 * self.inner * self.options.state_size)

    def transition_numbers(self) -> int:
        return self.num_heads
