"""The contract every token mixer keeps.

A mixer turns `x` `[B, T, C]` into `y` `[B, T, C]` and, asked for it, a state that lets the next call
go on where this one stopped: any split of a sequence into calls gives the result of one call.

Shape letters used in this package: B sequences, T tokens, C hidden size, H query heads, G key/value
heads, D head size, S state slots, N packed documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from .context import Context
from .documents import mix_documents
from .errors import LayerError, shown

S = TypeVar("S", bound="MixerState")


@dataclass(frozen=True)
class Site:
    """Where in a model a mixer stands; a layer used alone is layer 0 of 1."""

    hidden_size: int
    layer: int = 0
    num_layers: int = 1
    first_of_kind: bool = True  # the layer whose values the value residual of its kind shares


@dataclass(frozen=True)
class Flops:
    """Matrix-product FLOPs of one token (2 per multiply-add), visible query-key pairs only."""

    differentiable: float = 0.0
    routing: float = 0.0  # has no backward

    @property
    def forward(self) -> float:
        return self.differentiable + self.routing

    @property
    def training(self) -> float:
        """Forward and backward, without recomputation."""
        return 3 * self.differentiable + self.routing

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.differentiable + other.differentiable, self.routing + other.routing)


@dataclass
class MixerState:
    """What a mixer remembers between calls: tensors whose first axis is the batch, and host numbers.

    With gradients enabled a state is a value: calls leave it alone and it is differentiable. Without, a
    call takes its storage over, so that decoding writes in place; a state that was handed on is spent.
    """

    position: int = 0
    """Tokens seen since the start of the sequence."""
    _spent: bool = field(default=False, repr=False, kw_only=True)
    _maker: dict[str, Any] | None = field(default=None, repr=False, compare=False, kw_only=True)
    """`Mixer._facts` of the layer that made it; None where that is not known."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by field name; a state kept inside this one has dotted names (`inner.field`)."""
        found: dict[str, Tensor] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found[f.name] = value
            elif isinstance(value, MixerState):
                found.update({f"{f.name}.{name}": tensor for name, tensor in value.tensors().items()})
        return found

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same state with every tensor changed."""
        self._refuse_spent()
        changed: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = change(value)
            elif isinstance(value, MixerState):
                changed[f.name] = value.map(change)
        return replace(self, **changed)

    def select(self, rows: Sequence[int] | slice) -> Self:
        """The state of some sequences of the batch, in that order; repeats are allowed. A slice gives views,
        numbers an independent state."""
        index = rows if isinstance(rows, slice) else list(rows)
        return self.map(lambda t: t[index])

    @staticmethod
    def concatenate(states: Sequence[S]) -> S:
        """The sequences of all `states`, which differ in nothing but their tensors' values, as one batch."""
        tensors = [state.tensors() for state in states]
        joined = iter([torch.cat([own[name] for own in tensors]) for name in tensors[0]])
        return states[0].map(lambda _: next(joined))  # which goes by the order of `tensors`

    def detach(self) -> Self:
        return self.map(lambda t: t.detach())

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda t: t.to(device))

    def fork(self) -> Self:
        """An independent copy; both can be continued."""
        return self.map(lambda t: t.clone())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def refuse_batch(self, batch: int) -> None:
        """LayerError unless the state is one of `batch` sequences."""
        sizes = {tensor.shape[0] for tensor in self.tensors().values()} - {batch}
        if sizes:
            raise LayerError(f"the state holds {sizes.pop()} sequences, the call has {batch}")

    def take(self) -> Self:
        """The state for a call to go on from; without gradients this spends the caller's copy.

        Raises LayerError when the state was already handed on.
        """
        self._refuse_spent()
        if torch.is_grad_enabled():
            made_without = any(t.is_inference() for t in self.tensors().values())
            return self.fork() if made_without else self  # no backward takes inference mode's tensors
        taken = replace(self)
        self._spent = True
        return taken

    def _refuse_spent(self) -> None:
        if self._spent:
            raise LayerError(
                "this state was handed on to an earlier call, which may have overwritten it; "
                "use the state that call returned, or fork() before calling"
            )


class Mixer(nn.Module):
    """Base of all token mixers: built as `Kind(options, site)`; a subclass gives `mix` and the accounts."""

    kind: ClassVar[str]  # set by the registry
    Options: ClassVar[type]
    position_free: ClassVar[bool] = False
    """Whether sequences at different positions may share a batch: `mix` uses the position for nothing but
    counting, takes no routes, and its state has no other numbers beside tensors."""
    kept_vectors: ClassVar[float] = 19.5
    """About how many vectors of the hidden size a token keeps for the backward pass, two norms included."""

    def __init__(self, options: Any, site: Site) -> None:
        super().__init__()
        self.check(options, site)
        self.options = options
        self.site = site

    @classmethod
    def check(cls, options: Any, site: Site) -> None:
        """Whether a layer with these options can stand at `site`, without building it; LayerError if not."""

    @classmethod
    def value_width(cls, options: Any, site: Site) -> int | None:
        """Width of the values that this layer's value residual shares with its kind; None if it has none."""
        return None

    @classmethod
    def check_sharding(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        """Whether rows of `tokens` can be sharded over `size` ranks at this layer; LayerError if not.

        A mixer whose ranks know how to exchange what they need (see `context_parallel`) overrides this and
        `exchange_bytes`.
        """
        raise LayerError(
            f"layer {site.layer} ({cls.kind}) has no way to shard a sequence over {size} ranks: its kind "
            "does not say how its ranks exchange what they need"
        )

    def forward(self, x: Tensor, context: Context | None = None, state: Any = None) -> tuple[Tensor, Any]:
        """Mix tokens.

        Args:
            x: `[B, T, C]`, or one packed row `[1, T, C]` with `context.cu_seqlens`.
            context: see `Context`; None for plain equal rows.
            state: what the previous call returned, or None at the start. For a packed row a list with one
                state (or None) per document.

        Returns:
            `y` `[B, T, C]` in x's dtype and the state to go on from (None unless `context.want_state`).
        """
        self._refuse_input(x)
        if context is None:
            context = Context.of(x)
        if context.lengths and sum(context.lengths) != x.shape[1]:
            raise LayerError(f"documents of {context.lengths} tokens in a row of {x.shape[1]}")
        if context.shard is not None:
            context.refuse_shard(x)
            if state is not None:
                raise LayerError("a sequence sharded over ranks goes on from no state")
            self.check_sharding(self.options, self.site, context.shard.size, context.shard.tokens)
        if context.lengths and (context.want_state or state is not None):
            y, after = self.mix_documents(x, context, self._own_states(context, state))
        else:
            state = None if state is None else self._checked(state, x.shape[0]).take()
            y, after = self.mix(x, context, state)
        for one in after if isinstance(after, list) else [after]:
            if one is not None:
                one._maker = self._facts
        return y, after

    def mix(self, x: Tensor, context: Context, state: Any) -> tuple[Tensor, Any]:
        """The layer's mathematics. `state` may be written to when gradients are off. A packed row comes here
        without state; with states `mix_documents` cuts it."""
        raise NotImplementedError

    def mix_documents(self, x: Tensor, context: Context, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """A packed row with a state (or None) for every document, which may be written to as in `mix`."""
        return mix_documents(self, x, context, states)

    def _own_states(self, context: Context, states: Any) -> list[Any]:
        """The states of a packed row's documents, for this call to go on from; LayerError before any is
        spent."""
        if states is None:
            return [None] * len(context.lengths)
        if not isinstance(states, list | tuple):
            raise LayerError(f"a packed row takes a list of states, one per document, got {shown(states)}")
        if len(states) != len(context.lengths):
            raise LayerError(f"{len(states)} states for {len(context.lengths)} packed documents")
        checked = [None if state is None else self._checked(state, 1) for state in states]
        return [None if state is None else state.take() for state in checked]

    def _checked(self, state: Any, batch: int) -> MixerState:
        if not isinstance(state, self._state_type):
            raise LayerError(f"state must be a {self._state_type.__name__}, got {shown(state)}")
        mine, other = self._facts, state._maker or self._facts
        if other is not mine and other != mine:
            differing = [name for name in other | mine if other.get(name) != mine.get(name)]
            words = [f"{name} {other.get(name)}, here {mine.get(name)}" for name in differing]
            raise LayerError(f"the state is another layer's: {'; '.join(words)}")
        state.refuse_batch(batch)
        return state

    def _refuse_input(self, x: Tensor) -> None:
        """LayerError unless `x` is `[B, T, C]` in the parameters' dtype (any under autocast)."""
        width = self.site.hidden_size
        if x.ndim != 3 or x.shape[-1] != width:
            raise LayerError(f"x must be [batch, tokens, {width}], got {shown(x)}")
        if x.is_meta or next(self.parameters(), x).is_meta:
            raise LayerError(
                "nothing can be computed on the meta device: first layer.to_empty(device=...), and "
                "layer.reset_parameters() or layer.load_state_dict(...)"
            )
        if not x.is_floating_point() or not (
            any(parameter.dtype == x.dtype for parameter in self.parameters())
            or torch.is_autocast_enabled(x.device.type)
        ):
            dtypes = sorted({str(parameter.dtype) for parameter in self.parameters()})
            raise LayerError(
                f"x is {x.dtype}; the layer's parameters are {', '.join(dtypes)}: make them equal"
            )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What a state depends on."""
        options = dataclasses.asdict(self.options)
        return {"kind": self.kind, "hidden_size": self.site.hidden_size} | options

    @cached_property
    def _state_type(self) -> type[MixerState]:
        return type(self.empty_state(1))

    def empty_state(self, batch: int) -> MixerState:
        """The state before the first token, on the parameters' device."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters in place (also after meta-device construction)."""
        raise NotImplementedError

    def flops_per_token(self, context_length: int) -> Flops:
        """Mean over the positions of one sequence of `context_length` tokens, projections included."""
        raise NotImplementedError

    def flops_at(self, position: int) -> Flops:
        """Decoding the token at `position` (from 0), projections included; work once a chunk is spread."""
        raise NotImplementedError

    def state_bytes(self, context_length: int, element_size: int = 4) -> int:
        """Bytes of one sequence's state after `context_length` tokens, for activations of `element_size`."""
        raise NotImplementedError

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Bytes that `size` ranks which share `rows` rows of `tokens` tokens send each other in one forward
        pass, all of them together; the backward pass sends as many.

        A packed row is one row. `element_size`: bytes of an activation.
        """
        raise NotImplementedError

    def no_decay(self) -> set[str]:
        """Names of own parameters without weight decay: by default everything that is not a matrix."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim < 2}
