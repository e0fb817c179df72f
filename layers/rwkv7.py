"""RWKV-7 time mix: a matrix state per head that decays, forgets along one direction and takes in values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import value_residual
from .base import Flops, Site
from .context import Context
from .context_parallel import SequenceShard
from .errors import LayerError, require_counts, require_flags
from .linear.across import AcrossRanks
from .linear.mixer import RecurrentMixer
from .linear.rwkv7_op import LEAST_LOG_DECAY, rwkv7_recurrence
from .norms import compute_dtype
from .parameters import initialise
from .registry import register
from .state import MixerState
from .token_shift import last_token, previous, shift_ramp

RECURRENCE = AcrossRanks(rwkv7_recurrence)
HEAD_DIM = 64
NORM_EPS = 64e-5
STREAMS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
"""The shifted inputs and the powers of their initial mixes."""


@dataclass
class RWKV7Options:
    """Options of the RWKV-7 mixer; values out of range raise LayerError."""

    num_heads: int | None = None
    """H, heads of hidden_size / H features. None: hidden_size / head_dim."""
    head_dim: int | None = None
    """n; num_heads * head_dim is hidden_size. None: hidden_size / num_heads, or 64 where that is None too."""
    token_shift: bool = True
    """Mix each token with the one before it, in six ways; before the first one stands zero."""
    value_residual: bool = True
    """Gate values towards those of the first layer of this kind."""

    def __post_init__(self) -> None:
        require_counts(self, "num_heads", nullable=True)
        require_counts(self, "head_dim", least=2, nullable=True)
        require_flags(self, "token_shift", "value_residual")


@dataclass
class RWKV7State(MixerState):
    """State of the recurrence, and the last tokens for the shifts."""

    recurrent: Tensor | None = None  # [B, H, K, V], key index first; fp32 or wider
    shift: Tensor | None = None  # [B, C], the last token; None without token shift
    shift_first: Tensor | None = None  # [B, C], the last embedding, where the kind's shared values are made


@register("rwkv7")
class RWKV7(RecurrentMixer):
    """`S <- S (diag(w) - kappa (kappa * alpha)^T) + v k^T, y = S r` per head, normed and gated.

    From the RWKV-7 paper and the Key-Value Means paper's code. Names of parameters are upstream's.
    """

    Options = RWKV7Options
    kept_vectors = 34.0

    # The low-rank maps: offset, into and out of the narrow space. The output gate has no offset.
    w0: nn.Parameter
    w1: nn.Linear
    w2: nn.Linear
    a0: nn.Parameter
    a1: nn.Linear
    a2: nn.Linear
    v0: nn.Parameter
    v1: nn.Linear
    v2: nn.Linear
    g1: nn.Linear
    g2: nn.Linear

    def __init__(self, options: RWKV7Options, site: Site) -> None:
        super().__init__(options, site)
        size = site.hidden_size
        self.num_heads, self.head_dim = self.heads(options, size)
        if options.token_shift:
            for name in STREAMS:
                self.register_parameter(f"x_{name}", nn.Parameter(torch.empty(size)))
        self.receptance = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        self.ranks = low_ranks(size)
        if not options.value_residual:
            del self.ranks["v"]
        for name, rank in self.ranks.items():
            if name != "g":
                self.register_parameter(f"{name}0", nn.Parameter(torch.empty(size)))
            self.add_module(f"{name}1", nn.Linear(size, rank, bias=False))
            self.add_module(f"{name}2", nn.Linear(rank, size, bias=False))
        self.k_k = nn.Parameter(torch.empty(size))
        self.k_a = nn.Parameter(torch.empty(size))
        self.r_k = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.ln_x = _HeadNorm(size)
        self.reset_parameters()

    @classmethod
    def heads(cls, options: RWKV7Options, hidden_size: int) -> tuple[int, int]:
        """Resolve number and size of heads; raise LayerError where they do not make up `hidden_size`."""
        num_heads, head_dim = options.num_heads, options.head_dim
        if head_dim is None:
            head_dim = HEAD_DIM if num_heads is None else hidden_size // num_heads
        if num_heads is None:
            num_heads = hidden_size // head_dim
        if num_heads * head_dim != hidden_size or head_dim < 2:
            raise LayerError(
                f"num_heads {options.num_heads} and head_dim {options.head_dim} do not cut hidden_size "
                f"{hidden_size} into equal heads of 2 features or more (null for both: heads of {HEAD_DIM})"
            )
        return num_heads, head_dim

    @classmethod
    def check(cls, options: RWKV7Options, site: Site) -> None:
        cls.heads(options, site.hidden_size)

    @classmethod
    def check_sharding(cls, options: RWKV7Options, site: Site, size: int, tokens: int) -> None:
        """Allow any: ranks exchange states, and the token that the shift mixes with."""

    @classmethod
    def value_width(cls, options: RWKV7Options, site: Site) -> int | None:
        return site.hidden_size if options.value_residual else None

    def reset_parameters(self) -> None:
        """Initialise as upstream does; the output projection starts at zero."""
        initialise(self.receptance.weight, nn.init.orthogonal_)
        initialise(self.key.weight, lambda weight: nn.init.orthogonal_(weight, 0.1))
        initialise(self.value.weight, nn.init.orthogonal_)
        initialise(self.output.weight, nn.init.zeros_)
        if self.options.token_shift:
            depth = 1 - self.site.layer / self.site.num_layers
            for name, power in STREAMS.items():
                initialise(self.get_parameter(f"x_{name}"), partial(shift_ramp, power=power * depth))
        initialise(self.w0, self._reset_w0)
        initialise(self.a0, self._reset_a0)
        if self.options.value_residual:
            initialise(self.v0, value_residual.reset_gate0)
        initialise(self.k_k, lambda k_k: k_k.copy_(0.71 - 0.1 * _line(k_k)))
        initialise(self.k_a, lambda k_a: nn.init.constant_(k_a, 1.02))
        initialise(self.r_k, lambda r_k: nn.init.constant_(r_k, -0.04))
        for name in self.ranks:
            initialise(self.get_parameter(f"{name}1.weight"), nn.init.zeros_)
            initialise(self.get_parameter(f"{name}2.weight"), value_residual.reset_gate2)
        scale = ((1 + self.site.layer) / self.site.num_layers) ** 0.7
        initialise(self.ln_x.weight, lambda weight: nn.init.constant_(weight, scale))
        initialise(self.ln_x.bias, nn.init.zeros_)

    def _reset_w0(self, w0: Tensor) -> None:
        depth = self.site.layer / max(self.site.num_layers - 1, 1)
        ramp = (_line(w0) + 0.5) ** (1 + depth**0.3)
        w0.copy_(-6 + 6 * ramp + 0.5 + 2.5 * self._zigzag(w0))

    def _reset_a0(self, a0: Tensor) -> None:
        a0.copy_(-0.19 + 0.3 * self._zigzag(a0) + 0.4 * _line(a0))

    def _zigzag(self, like: Tensor) -> Tensor:
        """Make `u |u|` with u from -1 to 1 over every head."""
        half = (self.head_dim - 1) / 2
        i = torch.arange(like.numel(), dtype=like.dtype, device=like.device)
        u = (i % self.head_dim - half) / half
        return u * u.abs()

    def mix(self, x: Tensor, context: Context, state: RWKV7State | None) -> tuple[Tensor, RWKV7State | None]:
        state = state or RWKV7State()
        if context.shard is not None:
            x, state = self._shift_state(x, context, context.shard)
        shifted = self._shifted(x, state.shift, context)
        r, k, v = self.receptance(shifted["r"]), self.key(shifted["k"]), self.value(shifted["v"])
        if self.options.value_residual:
            v = self._mix_values(v, shifted["v"], x, context, state)
        wide = compute_dtype(x)
        z = self.w2(torch.tanh(self.w1(shifted["w"]))).to(wide)
        log_decay = LEAST_LOG_DECAY * torch.sigmoid(z + self.w0)
        rate = torch.sigmoid(self.a2(self.a1(shifted["a"])).to(wide) + self.a0)
        gate = self.g2(torch.sigmoid(self.g1(shifted["g"])))
        if context.statistics is not None:
            context.note(self.site.layer, decay=log_decay.exp(), erase_rate=rate)
        kappa = F.normalize(self._split(k.to(wide) * self.k_k), dim=-1, eps=1e-12)
        k = k.to(wide)
        k = torch.lerp(k, k * rate, self.k_a.to(wide))
        r, log_decay, k, v, rate = (self._split(t) for t in (r, log_decay, k, v, rate))
        o, recurrent = RECURRENCE(
            context, state.recurrent, r.dtype, r=r, log_decay=log_decay, k=k, v=v, a=-kappa, b=kappa * rate
        )
        bonus = (r.to(wide) * k * self.r_k).sum(-1, keepdim=True) * v.to(wide)
        y = self.ln_x(o.to(wide)) + bonus
        y = self.output((y.flatten(-2) * gate.to(wide)).to(gate.dtype)).to(x.dtype)
        return y, self._state(x, context, state, recurrent) if context.want_state else None

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def _shifted(
        self, x: Tensor, last: Tensor | None, context: Context, names: Iterable[str] = STREAMS
    ) -> dict[str, Tensor]:
        """Shift x for each stream."""
        if not self.options.token_shift:
            return dict.fromkeys(names, x)
        change = previous(x, last, "zero", context.lengths) - x
        mixes = torch.stack([self.get_parameter(f"x_{name}").to(x.dtype) for name in names])
        return dict(zip(names, torch.addcmul(x, change, mixes[:, None, None]), strict=True))

    def _mix_values(
        self, v: Tensor, shifted: Tensor, x: Tensor, context: Context, state: RWKV7State
    ) -> Tensor:
        """Apply the value residual; the first layer of the kind also computes what the others get.

        Its shared values are token-shifted like all values here. In a later layer of the model that shift
        runs over the embeddings, which the state therefore remembers beside the layer's own input.
        """
        if self.site.first_of_kind:
            first = v
            if self._reads_embedding and context.embedding is not None and context.embedding is not x:
                first = self.value(self._shifted(context.embedding, state.shift_first, context, "v")["v"])
            context.first_values[self.kind] = first
        else:
            first = value_residual.first_values(self, self.site.hidden_size, context)
        return value_residual.mix_values(v, first, self.v0, self.v2(self.v1(shifted)))

    def _shift_state(self, x: Tensor, context: Context, shard: SequenceShard) -> tuple[Tensor, RWKV7State]:
        """Get the token shifts' part of a state from the rank before; go on with the returned x."""
        if not self.options.token_shift:
            return x, RWKV7State()
        inputs = [x]
        if self._reads_embedding:
            inputs.append(x if context.embedding is None else context.embedding)
        (x, *_), lasts = shard.halo(*inputs)
        return x, RWKV7State(0, None, *lasts)

    @property
    def _reads_embedding(self) -> bool:
        """Whether the kind's shared values are made here of something else than the layer's input."""
        return self.options.value_residual and self.site.first_of_kind and self.site.layer > 0

    def _state(self, x: Tensor, context: Context, state: RWKV7State, recurrent: Tensor | None) -> RWKV7State:
        shift = shift_first = None
        if self.options.token_shift:
            shift = last_token(x)
            if self._reads_embedding:
                shift_first = last_token(x if context.embedding is None else context.embedding)
        return RWKV7State(state.position + x.shape[1], recurrent, shift, shift_first)

    def empty_state(self, batch: int) -> RWKV7State:
        weight = self.key.weight
        size = (batch, self.num_heads, self.head_dim, self.head_dim)
        recurrent = weight.new_zeros(size, dtype=compute_dtype(weight))
        shifts = [weight.new_zeros(batch, self.site.hidden_size) for _ in range(self._shifts)]
        return RWKV7State(0, recurrent, *shifts)

    @property
    def _shifts(self) -> int:
        """How many vectors the token shift remembers."""
        return self.options.token_shift * (1 + self._reads_embedding)

    # The recurrence counts as its four products of a state with a vector or of two vectors.

    def flops_at(self, position: int) -> Flops:
        size = self.site.hidden_size
        products = 4 * size**2 + 2 * size * sum(self.ranks.values()) + 4 * size * self.head_dim
        if self._reads_embedding:
            products += size**2  # the shared values
        return Flops(2.0 * products)

    def transition_numbers(self) -> int:
        return self.site.hidden_size * self.head_dim

    def no_decay(self) -> set[str]:
        return super().no_decay() | {"r_k"}  # a vector, by head


class _HeadNorm(nn.Module):
    """Normalise every head of `[..., H, n]`; weight and bias `[H * n]`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (p.to(x.dtype).unflatten(0, x.shape[-2:]) for p in (self.weight, self.bias))
        return torch.addcmul(bias, F.layer_norm(x, x.shape[-1:], eps=NORM_EPS), weight)


def low_ranks(hidden_size: int) -> dict[str, int]:
    """Choose the inner widths of the low-rank maps of decay, rate, value gate and output gate: multiples of
    32."""

    def rank(factor: float, power: float) -> int:
        return max(32, round(factor * hidden_size**power / 32) * 32)

    return {"w": rank(1.8, 0.5), "a": rank(1.8, 0.5), "v": rank(1.3, 0.5), "g": rank(0.6, 0.8)}


def _line(like: Tensor) -> Tensor:
    """Make numbers from -1/2 to 1/2 over the features."""
    i = torch.arange(like.numel(), dtype=like.dtype, device=like.device)
    return i / max(like.numel() - 1, 1) - 0.5
