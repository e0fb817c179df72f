"""What the softmax mixers have around their attention: q, k, v from x, and the output projection.

Order (Key-Value Means paper's code): linear maps, value residual on v, token shift of the projected
vectors, split into heads, norm of q and k, rotary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from . import value_residual
from .base import Flops, Mixer, Site
from .context import Context
from .context_parallel import SequenceShard, heads_per_rank, padded
from .errors import LayerError
from .heads import Heads, ProjectionOptions
from .norms import make_norm
from .parameters import initialise
from .rope import Rotary, positions, rotary, rotate
from .state import MixerState
from .token_shift import Last, last_token, shift_ramp, token_shift


@dataclass
class ProjectedState(MixerState):
    """State of a softmax mixer: last vectors for the token shift; subclasses add keys and values."""

    shift_q: Tensor | None = None  # [B, H * D], before the shift; None at the start or without token shift
    shift_k: Tensor | None = None  # [B, G * D]
    shift_v: Tensor | None = None  # [B, G * D], after the value residual


class Shift(NamedTuple):
    """The fields of a ProjectedState that the token shift needs, in their order."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class Projected(NamedTuple):
    """Operands of a softmax mixer's attention; of a sequence sharded over ranks all tokens, and this rank's
    share of heads."""

    q: Tensor  # [B, T, H, D], normalised and rotated
    k: Tensor  # [B, T, G, D], normalised and rotated
    v: Tensor  # [B, T, G, D]
    shift: Shift  # for the next state; of a packed row `[N, W]`, one row per document
    gate: Tensor | None = None  # [B, T, G], what `gates` gave

    def documents(self, lengths: Sequence[int]) -> list[Projected]:
        """Divide by packed documents."""
        sizes = list(lengths)

        def each(x: Tensor | None, size: int | list[int], axis: int) -> Sequence[Any]:
            return [None] * len(sizes) if x is None else x.split(size, axis)

        tokens = [each(x, sizes, 1) for x in (self.q, self.k, self.v, self.gate)]
        shifts = [each(x, 1, 0) for x in self.shift]
        rows = zip(*tokens, *shifts, strict=True)
        return [Projected(q, k, v, Shift(*shift), gate) for q, k, v, gate, *shift in rows]


class ProjectedMixer(Mixer):
    """Base of the softmax mixers; a subclass adds its attention, `core`, between `project` and `output`.

    Ranks that share a sequence trade tokens for heads: after the linear maps and the token shift each gets
    all tokens for its share of heads, attends as if it were alone, and gives its heads' outputs back. Or by a
    halo, where a mixer sees only so many keys before a rank's shard (`keys_before`): the rank before gives
    these, and all heads stay.
    """

    Options: ClassVar[type] = ProjectionOptions

    def __init__(self, options: Any, site: Site) -> None:
        super().__init__(options, site)
        heads = self.heads(options, site.hidden_size)
        self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_dim = heads
        size, self.kv_width = site.hidden_size, heads.num_kv_heads * heads.head_dim
        self.q_width = heads.num_heads * heads.head_dim
        self.c_q = nn.Linear(size, self.q_width, bias=options.qkv_bias)
        self.c_k = nn.Linear(size, self.kv_width, bias=options.qkv_bias)
        self.c_v = nn.Linear(size, self.kv_width, bias=options.qkv_bias)
        self.c_proj = nn.Linear(self.q_width, size, bias=False)
        if options.qk_norm != "none":
            self.ln_q = make_norm(options.qk_norm, heads.head_dim, options.qk_norm_eps)
            self.ln_k = make_norm(options.qk_norm, heads.head_dim, options.qk_norm_eps)
        if options.token_shift:
            self.x_q = nn.Parameter(torch.empty(self.q_width))
            self.x_k = nn.Parameter(torch.empty(self.kv_width))
            self.x_v = nn.Parameter(torch.empty(self.kv_width))
        if options.value_residual:
            rank = value_residual.gate_rank(size)
            self.v_gate0 = nn.Parameter(torch.empty(self.kv_width))
            self.v_gate1 = nn.Linear(size, rank, bias=False)
            self.v_gate2 = nn.Linear(rank, self.kv_width, bias=False)
        self._build()
        self.reset_parameters()

    def _build(self) -> None:
        """Build what a subclass has beside the projections (before `reset_parameters`)."""

    @classmethod
    def default_rotary_dim(cls, head_dim: int) -> int:
        """Rotate half of the head, as the paper's main layers do."""
        return head_dim // 4 * 2

    @classmethod
    def heads(cls, options: Any, hidden_size: int) -> Heads:
        """Resolve head counts and sizes for `hidden_size`; raise LayerError where the options do not fit
        it."""
        return Heads.of(options, hidden_size, cls.default_rotary_dim)

    @classmethod
    def check(cls, options: Any, site: Site) -> None:
        cls.heads(options, site.hidden_size)

    @classmethod
    def keys_before(cls, options: Any) -> int | None:
        """Give the most keys before a shard that queries in it see, sinks aside; None: all."""
        return None

    @classmethod
    def sinks_before(cls, options: Any) -> int:
        """Give how many first keys of a document all of its queries see."""
        return 0

    @classmethod
    def halo_of(cls, options: Any, site: Site, size: int, tokens: int) -> int | None:
        """Count the keys that a rank gets from the one before, beside sinks from all; None where ranks trade
        tokens for heads: that moves fewer bytes, or the keys are not all on one rank."""
        count, sinks = cls.keys_before(options), cls.sinks_before(options)
        if count is None or tokens % size or max(count, sinks) > tokens // size:
            return None
        heads, shared, *_ = cls.heads(options, site.hidden_size)
        if heads % size or (shared % size and size % shared):
            return count
        by_heads = tokens * (heads_per_rank(heads, size) + heads_per_rank(shared, size))
        return count if (count + sinks * size / 2) * shared < by_heads else None

    @classmethod
    def check_sharding(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        if cls.halo_of(options, site, size, tokens) is not None:
            return
        heads, shared, *_ = cls.heads(options, site.hidden_size)
        faults = [
            f"{count} {what}" for count, what in ((heads, "query heads"), (tokens, "tokens")) if count % size
        ]
        if shared % size and size % shared:
            faults.append(f"{shared} key/value heads")
        if faults:
            raise LayerError(
                f"layer {site.layer} ({cls.kind}) has {heads} query heads and {shared} key/value heads, for "
                f"{tokens} tokens sharded over {size} ranks: {' and '.join(faults)} cannot be shared out "
                "equally (key/value heads may also be fewer than the ranks, if they divide them)"
            )

    @classmethod
    def value_width(cls, options: Any, site: Site) -> int | None:
        if not options.value_residual:
            return None
        heads = cls.heads(options, site.hidden_size)
        return heads.num_kv_heads * heads.head_dim

    def reset_parameters(self) -> None:
        """Initialise as the paper's code does; the output projection starts at zero."""
        bound = 1 / math.sqrt(self.site.hidden_size)
        for linear in (self.c_q, self.c_k, self.c_v):
            initialise(linear.weight, lambda w: nn.init.uniform_(w, -bound, bound))
            if linear.bias is not None:
                initialise(linear.bias, nn.init.zeros_)
        initialise(self.c_proj.weight, nn.init.zeros_)
        if self.options.qk_norm != "none":
            self.ln_q.reset_parameters()
            self.ln_k.reset_parameters()
        if self.options.token_shift:
            depth = 1 - self.site.layer / self.site.num_layers
            initialise(self.x_q, lambda mix: shift_ramp(mix, 0.2 * depth))
            initialise(self.x_k, lambda mix: shift_ramp(mix, 0.7 * depth))
            initialise(self.x_v, lambda mix: shift_ramp(mix, 0.7 * depth))
        if self.options.value_residual:
            initialise(self.v_gate0, value_residual.reset_gate0)
            initialise(self.v_gate1.weight, nn.init.zeros_)
            initialise(self.v_gate2.weight, value_residual.reset_gate2)

    def mix(self, x: Tensor, context: Context, state: Any) -> tuple[Tensor, Any]:
        y, after = self.core(self.project(x, context, state), context, state)
        return self.output(y, x, context), after

    def mix_documents(self, x: Tensor, context: Context, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """Project the whole row at once; only the core sees documents."""
        documents = self.project(x, context, states).documents(context.lengths)
        outputs, after, routes = [], [], []
        for index, (own, state) in enumerate(zip(documents, states, strict=True)):
            alone = context.alone(index)
            y, state = self.core(own, alone, state)
            outputs.append(y)
            after.append(state)
            routes.append((alone.routes or {}).get(self.site.layer))
        context.keep_routes(self.site.layer, routes)
        return self.output(torch.cat(outputs, 1), x, context), after

    def gates(self, x: Tensor, context: Context) -> Tensor | None:
        """Compute numbers `[B, T, G]` that go with the keys' heads into the core, should it need any."""
        return None

    def core(self, heads: Projected, context: Context, state: Any) -> tuple[Tensor, Any]:
        """Attend: heads `[B, T, H, D]` that the queries gather, and the state to go on from (None unless
        wanted)."""
        raise NotImplementedError

    def project(
        self, x: Tensor, context: Context, state: ProjectedState | Sequence[ProjectedState | None] | None
    ) -> Projected:
        """Compute queries, keys and values of `x` `[B, T, C]`, and the token shift's part of the next state.

        `state`: for a packed row's documents a list.
        """
        q, k, v, gate = self.c_q(x), self.c_k(x), self.c_v(x), self.gates(x, context)
        if self.options.value_residual:
            v = self._mix_values(v, x, context)
        shift, (last, position) = Shift(), _before(state)
        if self.options.token_shift:
            if context.want_state:
                shift = Shift(*(last_token(x, context.lengths) for x in (q, k, v)))
            if context.shard is not None:
                (q, k, v), last = context.shard.halo(q, k, v)
            q = token_shift(q, self.x_q, last[0], lengths=context.lengths)
            k = token_shift(k, self.x_k, last[1], lengths=context.lengths)
            v = token_shift(v, self.x_v, last[2], lengths=context.lengths)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        shard = self.trading(context)
        if shard is not None:
            q, k, v, *gates = shard.to_heads(q, k, v, *(() if gate is None else (gate[..., None],)))
            gate = None if gate is None else gates[0].squeeze(-1)
        if self.options.qk_norm != "none":
            q, k = self.ln_q(q), self.ln_k(k)
        if self.rotary_dim:
            table = self._rotary(q, context, position)
            q, k = rotate(q, table), rotate(k, table)
        return Projected(q, k, v, shift, gate)

    def halo(self, context: Context) -> int | None:
        """Give `halo_of` for a call; None too where the sequence is not sharded."""
        shard = context.shard
        return None if shard is None else self.halo_of(self.options, self.site, shard.size, shard.tokens)

    def trading(self, context: Context) -> SequenceShard | None:
        """Give the call's shard if its ranks trade tokens for heads at this layer."""
        return context.shard if self.halo(context) is None else None

    def _rotary(self, q: Tensor, context: Context, start: int | tuple[int, ...]) -> Rotary:
        lengths = context.row_lengths
        if context.shard is not None and self.trading(context) is None:
            lengths, start = context.lengths, context.shard.carried
            if lengths:
                start = (start, *[0] * (len(lengths) - 1))
        options = self.options
        given = options.rotary_frequencies
        frequencies = None if given is None else tuple(given)
        settings = (
            self.rotary_dim,
            options.rotary_base,
            options.rotary_style,
            frequencies,
            options.rotary_scale,
        )
        key = ("rotary", start, q.shape[1], *settings)
        if key not in context.tables:
            context.tables[key] = rotary(positions(q.shape[1], start, lengths, q.device), *settings)
        return context.tables[key]

    def _mix_values(self, v: Tensor, x: Tensor, context: Context) -> Tensor:
        """Apply the value residual; the first layer of the kind also computes what the others get."""
        if self.site.first_of_kind:
            own_input = context.embedding is None or context.embedding is x
            first = v if own_input else self.c_v(context.embedding)
            context.first_values[self.kind] = first
        else:
            first = value_residual.first_values(self, self.kv_width, context)
        return value_residual.mix_values(v, first, self.v_gate0, self.v_gate2(self.v_gate1(x)))

    def own(self, parameter: Tensor, context: Context) -> Tensor:
        """Pick from a parameter of all query heads `[H]` those that `project` gave."""
        shard = self.trading(context)
        return parameter if shard is None else parameter[shard.own_heads(self.num_heads)]

    def output(self, y: Tensor, x: Tensor, context: Context) -> Tensor:
        """Project the heads' outputs, in the form of `project`'s queries, to `[B, T, C]` in x's dtype."""
        shard = self.trading(context)
        y = y if shard is None else shard.to_tokens(y)
        return self.c_proj(y.flatten(-2)).to(x.dtype)

    def projection_flops(self) -> Flops:
        """Count FLOPs of the linear maps for one token."""
        size, rank = self.site.hidden_size, value_residual.gate_rank(self.site.hidden_size)
        products = size * (2 * self.q_width + 2 * self.kv_width)
        if self.options.value_residual:
            products += rank * (size + self.kv_width)
            if self.site.first_of_kind and self.site.layer > 0:
                products += size * self.kv_width  # the shared values, from the embeddings
        return Flops(2.0 * products)

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Count the bytes of a forward pass: each rank sends the others their heads of its queries, keys and
        values, and later their tokens of its heads' outputs; or the next one its last keys and values, and
        all later ones its sinks. For the token shift its last token goes to the next rank."""
        halo = self.halo_of(self.options, self.site, size, tokens)
        if halo is not None:
            moved = (2 * halo + size * self.sinks_before(self.options)) * self.kv_width
        else:
            queries, keys = heads_per_rank(self.num_heads, size), heads_per_rank(self.num_kv_heads, size)
            queries, keys, gates = queries * self.head_dim, keys * self.head_dim, keys * self._gates()
            moved = tokens * (padded(queries) + 2 * padded(keys) + padded(gates) + queries)
        if self.options.token_shift:
            moved += self.q_width + 2 * self.kv_width
        return rows * (size - 1) * moved * element_size

    def _gates(self) -> int:
        """Count the numbers per token and key/value head that `gates` gives."""
        return 0

    def shift_bytes(self, context_length: int, element_size: int) -> int:
        """Count bytes of the token shift's part of the state."""
        if not self.options.token_shift or context_length == 0:
            return 0
        return (self.q_width + 2 * self.kv_width) * element_size


def _before(
    state: ProjectedState | Sequence[ProjectedState | None] | None,
) -> tuple[Sequence[Last], int | tuple[int, ...]]:
    """Read the last vectors of q, k and v and the position from a state, or from those of a packed row."""
    if state is None or isinstance(state, ProjectedState):
        one = state or ProjectedState()
        return (one.shift_q, one.shift_k, one.shift_v), one.position
    known = [one or ProjectedState() for one in state]
    last = [one.shift_q for one in known], [one.shift_k for one in known], [one.shift_v for one in known]
    return last, tuple(one.position for one in known)
