"""Key-Value Means attention as a layer: the projections around `kvm_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..base import Flops, Site
from ..context import Context
from ..context_parallel import SequenceShard
from ..errors import LayerError, is_count, require
from ..heads import Heads, ProjectionOptions
from ..norms import LayerNorm, compute_dtype
from ..parameters import always_used, initialise, ordered_gradients
from ..projections import Projected, ProjectedMixer, ProjectedState
from ..registry import register
from .attention import Budget, KVMSpec, KVMState, kvm_attention
from .contributions import Norm, Normed, Tokens
from .hand_off import handed_numbers, sharded_attention
from .spec import Update, updates


@dataclass
class KVMOptions(ProjectionOptions):
    """Defaults are those of the paper's growing state, 16 * sqrt(context) slots."""

    chunk: int = 256
    """Tokens absorbed by one state update, and slots of the first state."""
    window_chunks: int = 2
    """Chunks a query sees exactly, the one it stands in (up to itself) included."""
    sinks: int = 1
    """First tokens whose slots nothing is merged into; at most one chunk."""
    budget: str = "power_law"
    """Slots at context length t: fixed (budget_minimum), power_law (budget_factor * t ^ budget_exponent) or
    saturation (n * t / (n + t) with n = budget_saturation). A state starts with a chunk of slots."""
    budget_minimum: int = 256
    """Least number of slots; in fixed mode the number."""
    budget_factor: float = 16.0
    budget_exponent: float = 0.5
    budget_saturation: int = 1024
    """The number of slots that saturation mode approaches."""
    budget_round: int = 1
    """Growing budgets are rounded down to a multiple of this."""
    budget_max_chunks: int | None = None
    """At most so many chunks of slots; null: no such cap."""
    gate_keys: bool = True
    """The merge gate weights merged keys."""
    gate_values: bool = True
    """The merge gate weights merged values."""
    gate_appends: bool = False
    """The two gates above also weight tokens that become new slots (true in the paper's first code)."""
    gate_initial: bool = False
    """The merge gate also weights the first chunk's tokens."""
    temperatures: bool = True
    """A learned factor per query head on the logits of the window and on those of the state."""
    state_bias: bool = False
    """A learned number per query head added to the logits of the state (not in the paper)."""
    values: str = "radius"
    """How a slot's value is read: radius (direction of the sum, length of its first value), counts (mean of
    its tokens), or reference_counts (the public code's counter, to which every update adds 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("budget_minimum", "budget_saturation"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "a whole number of 1 or more")
        for field in fields(self):
            value = getattr(self, field.name)
            require(field.type != "bool" or isinstance(value, bool), field.name, value, "true, false")
        require(self.rotary_dim != 0, "rotary_dim", 0, "even numbers above 0 and below head_dim")
        self.spec(2)  # checks the rest

    def spec(self, rotary_dim: int) -> KVMSpec:
        """Make the operator's settings."""
        budget = Budget(
            self.budget, self.budget_minimum, self.budget_factor, self.budget_exponent,
            self.budget_saturation, self.budget_round, self.budget_max_chunks,
        )  # fmt: skip
        same = {field.name for field in fields(KVMSpec)} - {"rotary_dim", "budget"}
        settings = {name: getattr(self, name) for name in same}
        return KVMSpec(rotary_dim=rotary_dim, budget=budget, **settings)


@dataclass
class KVMLayerState(ProjectedState):
    """The operator's state beside the token shift's vectors."""

    operator: KVMState | None = None


@register("kvm")
class KVM(ProjectedMixer):
    """Exact attention to a window of chunks, and to everything older through a few slots."""

    Options = KVMOptions

    def _build(self) -> None:
        self.spec = self.options.spec(self.rotary_dim)
        self.ln_s_k = LayerNorm(self.head_dim)
        if self.spec.gated:
            self.merge_gate = nn.Linear(self.site.hidden_size, self.num_kv_heads, bias=False)
        if self.options.temperatures:
            self.front_head_temp = nn.Parameter(torch.empty(self.num_heads))
            self.state_head_temp = nn.Parameter(torch.empty(self.num_heads))
        if self.options.state_bias:
            self.state_head_bias = nn.Parameter(torch.empty(self.num_heads))

    @classmethod
    def heads(cls, options: Any, hidden_size: int) -> Heads:
        heads = super().heads(options, hidden_size)
        if not 0 < heads.rotary_dim < heads.head_dim:
            raise LayerError(
                f"rotary_dim is {heads.rotary_dim}; allowed: even numbers above 0 and below head_dim "
                f"{heads.head_dim}, because state keys are compared by the entries that are not rotated"
            )
        return heads

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.ln_s_k.reset_parameters()
        if self.spec.gated:
            bound = 1 / math.sqrt(self.site.hidden_size)
            initialise(self.merge_gate.weight, lambda w: nn.init.uniform_(w, -bound, bound))
        if self.options.temperatures:
            initialise(self.front_head_temp, nn.init.ones_)
            initialise(self.state_head_temp, nn.init.ones_)
        if self.options.state_bias:
            initialise(self.state_head_bias, nn.init.zeros_)

    def gates(self, x: Tensor, context: Context) -> Tensor | None:
        """Compute the merge gate's logits."""
        if not self.spec.gated:
            return None
        logits = self.merge_gate(x)
        if context.statistics is not None:
            mean, deviation = _spread(positive_gate(logits.detach()), context.shard)
            context.statistics.update(self._named({"gate_mean": mean, "gate_std": deviation}))
        return logits

    def core(
        self, heads: Projected, context: Context, state: KVMLayerState | None
    ) -> tuple[Tensor, KVMLayerState | None]:
        q, k, v, shift, logits = heads
        gate = None if logits is None else positive_gate(logits)
        layer, routes = self.site.layer, context.routes
        statistics: dict[str, Tensor] | None = None if context.statistics is None else {}
        # Ranks that hand on a state use them in other places than those that do not.
        weight, bias, front, back, state_bias = ordered_gradients(
            self.ln_s_k.weight, self.ln_s_k.bias, *self._of_heads(context)
        )
        settings: dict[str, Any] = {
            "spec": self.spec,
            "norm_weight": weight,
            "norm_bias": bias,
            "front_temperature": front,
            "state_temperature": back,
            "state_bias": state_bias,
            "routes": None if routes is None else routes.get(layer),
            "want_routes": routes is not None,
            "statistics": statistics,
        }
        operator: KVMState | None = None
        made: Any
        if context.shard is not None and self.trading(context) is None:
            y, made = sharded_attention(q, Tokens(k, v, gate), context.shard, **settings)
        else:
            settings |= {"lengths": context.row_lengths, "want_state": context.want_state}
            start = None if state is None else state.operator
            y, operator, made = kvm_attention(q, k, v, gate, state=start, **settings)
        # Sequences no longer than the window reach none of these.
        y = always_used(y, weight, bias, *(() if gate is None else (gate,)))
        if routes is not None:
            routes.setdefault(layer, made)
        if statistics is not None and context.statistics is not None:
            statistics["window_mass"] = 1 - statistics["state_mass"]
            context.statistics.update(self._named(statistics))
        if operator is None:
            return y, None
        return y, KVMLayerState(operator.position, *shift, operator)

    @classmethod
    def hands_on(cls, options: Any, site: Site, size: int) -> bool:
        """Whether its state goes from rank to rank, as its heads cannot be shared out."""
        heads, shared, *_ = cls.heads(options, site.hidden_size)
        return bool(heads % size or (shared % size and size % shared))

    @classmethod
    def check_sharding(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        if not cls.hands_on(options, site, size):
            super().check_sharding(options, site, size, tokens)
        elif tokens % size:
            raise LayerError(
                f"layer {site.layer} ({cls.kind}): {tokens} tokens do not divide over {size} ranks"
            )

    def trading(self, context: Context) -> SequenceShard | None:
        shard = context.shard
        return None if shard is None or self.hands_on(self.options, self.site, shard.size) else shard

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Count the bytes that ranks send each other. Where heads cannot be shared, each but the last sends
        the next one its state, in at least fp32, and its last token for the token shift."""
        if not self.hands_on(self.options, self.site, size):
            return super().exchange_bytes(rows, tokens, size, element_size)
        shape = rows, self.num_kv_heads, self.head_dim
        ends = range(tokens // size, tokens, tokens // size)
        moved = sum(handed_numbers(self.spec, end, *shape) for end in ends) * max(element_size, 4)
        if self.options.token_shift:
            moved += rows * (size - 1) * (self.q_width + 2 * self.kv_width) * element_size
        return moved

    def _of_heads(self, context: Context) -> list[Tensor | None]:
        """Return temperatures of the window and of the state, and the state's bias, of the heads at hand."""
        names = ("front_head_temp", "state_head_temp", "state_head_bias")
        found = [getattr(self, name, None) for name in names]
        return [None if x is None else self.own(x, context) for x in found]

    def masses(self, q: Tensor, state: KVMState) -> tuple[Tensor, Tensor]:
        """Compute the attention of the last token, for people to look at (without gradient).

        Args:
            q: its queries `[B, 1, H, D]`, as `project` gives them.
            state: as it is after this token.

        Returns:
            The mass on every slot `[B, H, S]` (S is 0 while slots are not read) and on every token of the
            window `[B, H, W]`, in fp32 or wider; over both they sum to 1.
        """
        norm = Norm(*(x.to(compute_dtype(q)) for x in (self.ln_s_k.weight, self.ln_s_k.bias)))
        slots = Normed(state.sums().keys, norm).out
        if not self.spec.window_start(state.position):
            slots = slots[:, :, :0]
        window = state.window().k.transpose(1, 2).to(norm.weight.dtype)
        # The query heads of one key/value head lie side by side.
        grouped = q[:, 0].to(norm.weight.dtype).unflatten(1, (self.num_kv_heads, -1)) / math.sqrt(
            self.head_dim
        )
        logits = [(grouped @ keys.mT).flatten(1, 2) for keys in (slots, window)]
        if self.options.temperatures:
            logits = [logits[0] * self.state_head_temp[:, None], logits[1] * self.front_head_temp[:, None]]
        if self.options.state_bias:
            logits[0] = logits[0] + self.state_head_bias[:, None]
        count = slots.shape[2]
        mass = torch.cat(logits, -1).softmax(-1)
        return mass[..., :count], mass[..., count:]

    def _named(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Name statistics as `Context.statistics` does."""
        return {f"{self.site.layer}/{name}": value for name, value in found.items()}

    def _gates(self) -> int:
        return int(self.spec.gated)

    def empty_state(self, batch: int) -> KVMLayerState:
        like = self.c_k.weight.new_empty(batch, 0, self.num_kv_heads, self.head_dim)
        return KVMLayerState(operator=KVMState.empty(like, self.spec.gated))

    # Accounts. Chunk c of queries reads the slots after update c - window_chunks; that update, made at the
    # chunk's first token, compares every key of one chunk with every slot there is then, once.

    def flops_at(self, position: int) -> Flops:
        last = self._updates(position)[-1:]
        window = position + 1 - self.spec.window_start(position + 1)
        visible = window + sum(update.after for update in last)
        return self._token_flops(visible, self._routing_flops(last) / self.spec.chunk)

    def flops_per_token(self, context_length: int) -> Flops:
        chunk, visible = self.spec.chunk, 0
        steps = self._updates(context_length - 1)
        slots = {update.number: update.after for update in steps}
        for number, first in enumerate(range(0, context_length, chunk), -self.spec.window_chunks):
            count = min(chunk, context_length - first)
            window = first - self.spec.window_start(first + 1)
            visible += count * (slots.get(number, 0) + window) + count * (count + 1) // 2
        return self._token_flops(visible / context_length, self._routing_flops(steps) / context_length)

    def _updates(self, position: int) -> list[Update]:
        """List the updates up to the one whose slots the query at `position` reads."""
        last = position // self.spec.chunk - self.spec.window_chunks
        return updates(self.spec, [last]) if last >= 0 else []

    def _routing_flops(self, updates: list[Update]) -> float:
        """Count comparisons; update 0 has no choice, nor has one that appends a whole chunk."""
        chunk = self.spec.chunk
        compared = sum(u.after for u in updates if u.number and u.after - u.before < chunk)
        return 2.0 * chunk * compared * self.kv_width

    def _token_flops(self, visible: float, routing: float) -> Flops:
        products = self.site.hidden_size * self.num_kv_heads if self.spec.gated else 0  # the merge gate
        pairs = Flops(2.0 * products + 4.0 * self.num_heads * self.head_dim * visible, routing)
        return self.projection_flops() + pairs

    def state_bytes(self, context_length: int, element_size: int = 4) -> int:
        wide = max(element_size, 4)
        window_start, slots = self.spec.window_start(context_length), self.spec.slots_at(context_length)
        slot = self.num_kv_heads * (2 * self.head_dim + 1) * wide
        token = 2 * self.kv_width * element_size + (self.num_kv_heads * wide if self.spec.gated else 0)
        held = slots * slot + (context_length - window_start) * token
        return held + self.shift_bytes(context_length, element_size)


def positive_gate(logits: Tensor) -> Tensor:
    """Turn logits into gates above 0, `1 + elu(logits)`, in at least fp32."""
    z = logits.to(compute_dtype(logits))
    return torch.exp(z.clamp(max=0)) + torch.relu(z)


def _spread(x: Tensor, shard: SequenceShard | None) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation of `x`, over all ranks that share the sequence."""
    if shard is None:
        return x.mean(), x.std()
    x = x.double()
    total, squares = shard.gather(torch.stack((x.sum(), x.square().sum()))).sum(0)
    count = x.numel() * shard.size
    mean = total / count
    return mean, ((squares - count * mean.square()).clamp(min=0) / (count - 1)).sqrt()
