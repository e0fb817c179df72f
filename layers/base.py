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
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from .documents import mix_documents

if TYPE_CHECKING:
    from .cut import SequenceCut

S = TypeVar("S", bound="MixerState")


class LayerError(ValueError):
    """Options or inputs that a layer cannot take; the message names them and what is allowed."""


def require(condition: bool, option: str, value: Any, allowed: str) -> None:
    """LayerError naming the option, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise LayerError(f"{option} is {value!r}; allowed: {allowed}")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether `value` is a whole number (not a bool) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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
class Context:
    """What one call knows beside `x`; built by the model for each call, or by `Context.of` for one layer."""

    cu_seqlens: Tensor | None = None
    """Borders of documents packed in a row `[1, T]`: int32 `[N + 1]`, first 0, last T. None: equal rows."""
    lengths: tuple[int, ...] = ()
    """The packed documents' lengths on the host; empty for equal rows."""
    want_state: bool = True
    embedding: Tensor | None = None
    """Token embeddings after this layer's own norm `[B, T, C]`: what a first-of-kind layer computes the
    shared value from. None: the layer's input itself (a layer used alone)."""
    first_values: dict[str, Tensor] = field(default_factory=dict)
    """Registry kind -> values of its first layer `[B, T, G * D]`; that layer writes, later ones read."""
    routes: dict[int, Any] | None = None
    """Layer index -> routing decisions. A layer found here replays them, another records its own;
    None: neither. For a packed row with state they are a list, one entry per document."""
    tables: dict[Any, Any] = field(default_factory=dict)
    """What layers of this call compute alike, by a key of their own: rotary tables."""
    statistics: dict[str, Tensor] | None = None
    """Where mixers leave scalars for monitoring, keyed `layer_index/name`; None: do not compute them."""
    cut: SequenceCut | None = None
    """How the row is cut over ranks. Then x and the fields above are of this rank's chunk alone, whose first
    piece may go on with the document that the rank before ends with (`cut.continues`)."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        want_state: bool = True,
        cut: SequenceCut | None = None,
        **more: Any,
    ) -> Context:
        """Context of a call with input `x` `[B, T, ...]`; with a `cut`, which knows the documents, `x` is
        this rank's chunk.

        Raises LayerError when there are no tokens, `cu_seqlens` does not cut the row into non-empty
        documents, or the chunk is not what `cut` says.
        """
        if x.shape[0] < 1 or x.shape[1] < 1:
            raise LayerError(f"a call needs at least one sequence and one token, got shape {tuple(x.shape)}")
        if cut is not None:
            if cu_seqlens is not None:
                raise LayerError("a row cut over ranks has its documents in the cut: leave cu_seqlens out")
            if cut.lengths:
                borders = [0, *accumulate(cut.lengths)]
                cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=x.device)
        found = cls(cu_seqlens, document_lengths(cu_seqlens, x), want_state, cut=cut, **more)
        found.refuse_chunk(x)
        return found

    def note(self, layer: int, **values: Tensor) -> None:
        """Leave the means of `values` as the layer's scalars, where `statistics` is wanted."""
        assert self.statistics is not None
        self.statistics.update({f"{layer}/{name}": x.detach().float().mean() for name, x in values.items()})

    @property
    def whole(self) -> tuple[int, ...]:
        """The documents' lengths in the whole row, be it cut over ranks or not."""
        return self.lengths if self.cut is None else self.cut.whole

    def refuse_chunk(self, x: Tensor) -> None:
        """LayerError unless `x` is a chunk as the cut, if there is one, has them, and no state is wanted."""
        if self.cut is None:
            return
        if x.shape[1] != self.cut.length:
            raise LayerError(
                f"{x.shape[1]} tokens on rank {self.cut.rank}; {self.cut.tokens} tokens over {self.cut.size} "
                f"ranks are {self.cut.length} each"
            )
        if self.want_state:
            raise LayerError("no state is kept of a sequence cut over ranks: set want_state to False")

    def alone(self, index: int) -> Context:
        """The context of one packed document without what it has for every token: its own routes."""
        routes = None
        if self.routes is not None:
            routes = {layer: kept[index] for layer, kept in self.routes.items() if isinstance(kept, list)}
        return replace(
            self, cu_seqlens=None, lengths=(), embedding=None, first_values={}, routes=routes, tables={}
        )

    def keep_routes(self, layer: int, routes: list[Any]) -> None:
        """Record a layer's routing decisions, one entry per packed document."""
        if self.routes is not None and routes[0] is not None:
            self.routes[layer] = routes


def document_lengths(cu_seqlens: Tensor | None, x: Tensor) -> tuple[int, ...]:
    """Lengths of the documents packed in `x` `[1, T, ...]`, on the host; empty without `cu_seqlens`."""
    if cu_seqlens is None:
        return ()
    whole = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not whole or cu_seqlens.ndim != 1:
        raise LayerError(f"cu_seqlens must be one row of int32 in a tensor, got {_shown(cu_seqlens)}")
    borders = cu_seqlens.tolist()
    if x.shape[0] != 1:
        raise LayerError(f"cu_seqlens needs one packed row, got a batch of {x.shape[0]}")
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != x.shape[1]:
        raise LayerError(f"cu_seqlens must run from 0 to the row's {x.shape[1]} tokens, got {borders}")
    lengths = tuple(end - start for start, end in pairwise(borders))
    for index, length in enumerate(lengths):
        if length < 1:
            raise LayerError(
                f"document {index} of the packed row has {length} tokens (cu_seqlens {borders}); "
                "leave empty documents out"
            )
    return lengths


def _shown(value: Any) -> str:
    """What was given, in a few words."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@dataclass
class MixerState:
    """What a mixer remembers between calls: tensors whose first axis is the batch, and host numbers.

    With gradients enabled a state is a value: calls leave it alone and it is differentiable. Without, a
    call takes its storage over, so that decoding writes in place; a state that was handed on is spent.
    """

    position: int = 0
    """Tokens seen since the start of the sequence."""
    _spent: bool = field(default=False, repr=False, kw_only=True)

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
            return self
        taken = replace(self)
        self._spent = True
        return taken

    def _refuse_spent(self) -> None:
        if self._spent:
            raise LayerError(
                "this state was handed on to an earlier call, which may have overwritten it; "
                "use the state that call returned, or fork() before calling"
            )


def initialise(parameter: Tensor, init: Callable[[Tensor], Any]) -> None:
    """Fill `parameter` in place by `init`, which gets an fp32 tensor of its full shape.

    The values do not depend on the parameter's dtype, nor on how FSDP2 shards it (every rank draws the
    full tensor and keeps its part; torch's own orthogonal init cannot write into a DTensor). On the meta
    device it does nothing.
    """
    if parameter.is_meta:
        return
    value = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    with torch.no_grad():
        init(value)
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(parameter, DTensor)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


class _AlwaysUsed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *tensors: Tensor) -> Tensor:
        # Not the tensors themselves: ZeRO-3 has taken a parameter apart by the time of the backward.
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.like)


def always_used(y: Tensor, *tensors: Tensor) -> Tensor:
    """`y` itself, through which `tensors` get at least a zero gradient.

    For parameters that some inputs do not reach: data-parallel training goes wrong where a parameter has a
    gradient on one rank and none on another. Where a submodule owns the parameter give its output instead,
    so that the gradient comes to it the usual way.
    """
    return _AlwaysUsed.apply(y, *tensors) if torch.is_grad_enabled() else y


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
    def check_cut(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        """Whether rows of `tokens` can be cut over `size` ranks at this layer; LayerError if not.

        A mixer whose ranks know how to exchange what they need (see `cut.SequenceCut`) overrides this and
        `cut_bytes`.
        """
        raise LayerError(
            f"layer {site.layer} ({cls.kind}) has no way to cut a sequence over {size} ranks: its kind does "
            "not say how its ranks exchange what they need"
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
        if context.cut is not None:
            context.refuse_chunk(x)
            if state is not None:
                raise LayerError("a sequence cut over ranks goes on from no state")
            self.check_cut(self.options, self.site, context.cut.size, context.cut.tokens)
        if context.lengths and (context.want_state or state is not None):
            return self.mix_documents(x, context, self._own_states(context, state))
        if state is not None:
            state = self._checked(state, x.shape[0]).take()
        return self.mix(x, context, state)

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
            raise LayerError(f"a packed row takes a list of states, one per document, got {_shown(states)}")
        if len(states) != len(context.lengths):
            raise LayerError(f"{len(states)} states for {len(context.lengths)} packed documents")
        checked = [None if state is None else self._checked(state, 1) for state in states]
        return [None if state is None else state.take() for state in checked]

    def _checked(self, state: Any, batch: int) -> MixerState:
        if not isinstance(state, self._state_type):
            raise LayerError(f"state must be a {self._state_type.__name__}, got {_shown(state)}")
        state.refuse_batch(batch)
        return state

    def _refuse_input(self, x: Tensor) -> None:
        """LayerError unless `x` is `[B, T, C]` in the parameters' dtype (any under autocast)."""
        width = self.site.hidden_size
        if x.ndim != 3 or x.shape[-1] != width:
            raise LayerError(f"x must be [batch, tokens, {width}], got {_shown(x)}")
        if not x.is_floating_point() or not (
            any(parameter.dtype == x.dtype for parameter in self.parameters())
            or torch.is_autocast_enabled(x.device.type)
        ):
            dtypes = sorted({str(parameter.dtype) for parameter in self.parameters()})
            raise LayerError(
                f"x is {x.dtype}; the layer's parameters are {', '.join(dtypes)}: make them equal"
            )

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

    def cut_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Bytes that `size` ranks which share `rows` rows of `tokens` tokens send each other in one forward
        pass, all of them together; the backward pass sends as many.

        A packed row is one row. `element_size`: bytes of an activation.
        """
        raise NotImplementedError

    def no_decay(self) -> set[str]:
        """Names of own parameters without weight decay: by default everything that is not a matrix."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim < 2}
