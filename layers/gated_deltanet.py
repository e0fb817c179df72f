"""Gated DeltaNet: linear attention whose state decays and is corrected towards the newest value.

Gated DeltaNet paper and flash-linear-attention's layer of that name, whose parameter names these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Flops, Site
from .context import Context
from .errors import LayerError, require_counts, require_flags, require_positive
from .linear.across import AcrossRanks
from .linear.delta_rule import gated_delta_rule
from .linear.mixer import RecurrentMixer
from .linear.short_conv import ShortConv, last_of_rank, refuse_short_chunks
from .norms import RMSNorm, compute_dtype
from .parameters import initialise, reset_decay_rate, reset_time_step, reset_uniform
from .registry import register
from .state import MixerState

DELTA_RULE = AcrossRanks(partial(gated_delta_rule, normalise=True))


@dataclass
class DeltaOptions:
    """Options of the two delta-rule mixers; values out of range raise LayerError."""

    num_heads: int | None = None
    """Query/key heads H. None: as many of head_k_dim as make up the kind's usual key width."""
    num_v_heads: int | None = None
    """Value heads HV, a multiple of num_heads; value head j reads head j // (HV / H). None: num_heads."""
    head_k_dim: int | None = None
    """Key width K. None: the kind's usual key width / num_heads, or the kind's usual K without that too."""
    head_v_dim: int | None = None
    """Value width V. None: what gives all value heads together the kind's usual width."""
    use_short_conv: bool = True
    """Convolve q, k and v over the last few tokens."""
    conv_size: int = 4
    """Tokens that the convolution sees, the current one included."""
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    """Write strengths from 0 to 2 instead of 0 to 1, so that a state can also change sign."""
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_counts(self, "num_heads", "num_v_heads", "head_k_dim", "head_v_dim", nullable=True)
        require_counts(self, "conv_size")
        require_flags(self, "use_short_conv", "conv_bias", "allow_neg_eigval")
        require_positive(self, "norm_eps")


class DeltaHeads(NamedTuple):
    """Head counts and sizes for one hidden size."""

    num_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int


@dataclass
class DeltaState(MixerState):
    """State of the delta rule, and the short convolutions' last inputs (oldest first; none without them)."""

    recurrent: Tensor | None = None  # [B, HV, K, V], at least fp32; key index first
    conv_q: Tensor | None = None  # [B, H * K, conv_size]
    conv_k: Tensor | None = None  # [B, H * K, conv_size]
    conv_v: Tensor | None = None  # [B, HV * V, conv_size]


class DeltaMixer(RecurrentMixer):
    """Base of Gated DeltaNet and Kimi Delta Attention; a subclass gives the decay and the output gate."""

    default_head_k_dim: int
    key_share: tuple[int, int]  # usual width of all keys together, as a fraction of hidden_size
    value_ratio: int  # usual width of all values together, in widths of all keys

    def __init__(self, options: Any, site: Site) -> None:
        super().__init__(options, site)
        self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = heads = self.heads(
            options, site.hidden_size
        )
        size = site.hidden_size
        self.key_width = heads.num_heads * heads.head_k_dim
        self.v_width = heads.num_v_heads * heads.head_v_dim
        self.q_proj = nn.Linear(size, self.key_width, bias=False)
        self.k_proj = nn.Linear(size, self.key_width, bias=False)
        self.v_proj = nn.Linear(size, self.v_width, bias=False)
        self.b_proj = nn.Linear(size, heads.num_v_heads, bias=False)
        self.o_proj = nn.Linear(self.v_width, size, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads.num_v_heads))
        self.o_norm = RMSNorm(heads.head_v_dim, options.norm_eps)
        if options.use_short_conv:
            self.q_conv1d = ShortConv(self.key_width, options.conv_size, options.conv_bias)
            self.k_conv1d = ShortConv(self.key_width, options.conv_size, options.conv_bias)
            self.v_conv1d = ShortConv(self.v_width, options.conv_size, options.conv_bias)
        self._build()
        self.reset_parameters()

    def _build(self) -> None:
        """Build the decay's and the gate's parameters (before `reset_parameters`)."""
        raise NotImplementedError

    def log_decay(self, x: Tensor) -> Tensor:
        """`[B, T, HV]`, or `[B, T, HV, K]` for a decay per key channel, in at least fp32; at most 0."""
        raise NotImplementedError

    def gate(self, o: Tensor, x: Tensor) -> Tensor:
        """Multiply the normalised heads `o` `[B, T, HV, V]` by the output gate."""
        raise NotImplementedError

    @classmethod
    def heads(cls, options: Any, hidden_size: int) -> DeltaHeads:
        """Resolve head counts and sizes for `hidden_size`; raise LayerError where the options do not fit
        it."""
        part, parts = cls.key_share
        num_heads, head_k_dim = options.num_heads, options.head_k_dim
        if num_heads is None or head_k_dim is None:
            known = "head_k_dim" if num_heads is None else "num_heads"
            divisor = (head_k_dim or cls.default_head_k_dim) if num_heads is None else num_heads
            found, rest = divmod(hidden_size * part, parts * divisor)
            if rest or not found:
                other = "num_heads" if num_heads is None else "head_k_dim"
                raise LayerError(
                    f"{other} is not given, and {part}/{parts} of hidden_size {hidden_size} is no multiple "
                    f"of {known} {divisor}; give {other} as well"
                )
            num_heads, head_k_dim = (found, divisor) if num_heads is None else (num_heads, found)
        num_v_heads = options.num_v_heads or num_heads
        if num_v_heads % num_heads:
            raise LayerError(f"num_v_heads is {num_v_heads}; allowed: multiples of num_heads {num_heads}")
        head_v_dim = options.head_v_dim
        if head_v_dim is None:
            head_v_dim, rest = divmod(cls.value_ratio * num_heads * head_k_dim, num_v_heads)
            if rest:
                raise LayerError(
                    f"head_v_dim is not given, and {cls.value_ratio} * {num_heads} * {head_k_dim} is no "
                    f"multiple of num_v_heads {num_v_heads}; give head_v_dim as well"
                )
        return DeltaHeads(num_heads, num_v_heads, head_k_dim, head_v_dim)

    @classmethod
    def check(cls, options: Any, site: Site) -> None:
        cls.heads(options, site.hidden_size)

    @classmethod
    def check_sharding(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        """Refuse shards shorter than a convolution: ranks exchange states, and the tokens that the
        convolutions see."""
        if options.use_short_conv:
            refuse_short_chunks(f"layer {site.layer} ({cls.kind})", options.conv_size, size, tokens)

    def reset_parameters(self) -> None:
        """Initialise linear maps and convolutions as torch does."""
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                reset_uniform(linear, linear.in_features)
        self.o_norm.reset_parameters()
        if self.options.use_short_conv:
            for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d):
                conv.reset_parameters()

    def mix(self, x: Tensor, context: Context, state: DeltaState | None) -> tuple[Tensor, DeltaState | None]:
        state = state or DeltaState()
        u_q, u_k, u_v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if context.shard is not None and self.options.use_short_conv:
            u_q, lasts = last_of_rank(context.shard, self.options.conv_size, u_q, u_k, u_v)
            state = DeltaState(0, None, *lasts)
        q, conv_q = self._convolve("q", u_q, state.conv_q, context)
        k, conv_k = self._convolve("k", u_k, state.conv_k, context)
        v, conv_v = self._convolve("v", u_v, state.conv_v, context)
        wide = compute_dtype(x)
        beta = torch.sigmoid(self.b_proj(x).to(wide))
        if self.options.allow_neg_eigval:
            beta = 2 * beta
        g = self.log_decay(x)
        if context.statistics is not None:
            context.note(self.site.layer, decay=g.exp(), write_strength=beta)
        o, recurrent = DELTA_RULE(
            context,
            state.recurrent,
            u_q.dtype,
            q=q.unflatten(-1, (self.num_heads, -1)),
            k=k.unflatten(-1, (self.num_heads, -1)),
            v=v.unflatten(-1, (self.num_v_heads, -1)),
            g=g,
            beta=beta,
        )
        o = self.gate(self.o_norm(o.to(wide)), x)
        y = self.o_proj(o.flatten(-2).to(x.dtype)).to(x.dtype)
        if not context.want_state:
            return y, None
        return y, DeltaState(state.position + x.shape[1], recurrent, conv_q, conv_k, conv_v)

    def _convolve(
        self, name: str, u: Tensor, last: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        """Give SiLU of the convolution of `u` (or of `u`), in at least fp32, and the inputs to carry on."""
        if not self.options.use_short_conv:
            return F.silu(u.to(compute_dtype(u))), None
        return getattr(self, f"{name}_conv1d")(u, last, context.lengths)

    def empty_state(self, batch: int) -> DeltaState:
        weight = self.o_proj.weight
        shape = (batch, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        state = DeltaState(recurrent=weight.new_zeros(shape, dtype=compute_dtype(weight)))
        if self.options.use_short_conv:
            width = self.options.conv_size
            state.conv_q = weight.new_zeros(batch, self.key_width, width)
            state.conv_k = weight.new_zeros(batch, self.key_width, width)
            state.conv_v = weight.new_zeros(batch, self.v_width, width)
        return state

    # The recurrence counts as read with the key, write, read with the query.

    def gate_products(self) -> int:
        """Count the multiply-adds of one token's decay and output gate."""
        raise NotImplementedError

    def flops_at(self, position: int) -> Flops:
        size = self.site.hidden_size
        maps = size * (2 * self.key_width + 2 * self.v_width + self.num_v_heads) + self.gate_products()
        return Flops(2.0 * maps + 6.0 * self.head_k_dim * self.v_width)

    def transition_numbers(self) -> int:
        return self.num_v_heads * self.head_k_dim**2


@dataclass
class GatedDeltaNetOptions(DeltaOptions):
    """Options of Gated DeltaNet; usual widths: keys 3/4 of hidden_size together, in heads of 64, values twice
    that."""

    use_gate: bool = True
    """Multiply the normalised output by silu of a projection."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flags(self, "use_gate")


@register("gated_deltanet")
class GatedDeltaNet(DeltaMixer):
    """The gated delta rule with one decay per value head."""

    Options = GatedDeltaNetOptions
    kept_vectors = 31.0
    default_head_k_dim = 64
    key_share = (3, 4)
    value_ratio = 2

    def _build(self) -> None:
        size = self.site.hidden_size
        self.a_proj = nn.Linear(size, self.num_v_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.num_v_heads))
        if self.options.use_gate:
            self.g_proj = nn.Linear(size, self.v_width, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        initialise(self.A_log, lambda a: reset_decay_rate(a, 0, 16))
        initialise(self.dt_bias, reset_time_step)

    def log_decay(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        step = F.softplus(self.a_proj(x).to(dtype) + self.dt_bias.to(dtype))
        return -self.A_log.to(dtype).exp() * step

    def gate(self, o: Tensor, x: Tensor) -> Tensor:
        if not self.options.use_gate:
            return o
        return o * F.silu(self.g_proj(x).to(o.dtype)).unflatten(-1, o.shape[-2:])

    def gate_products(self) -> int:
        return self.site.hidden_size * (self.num_v_heads + self.options.use_gate * self.v_width)
