"""The contract every token mixer keeps.

A mixer turns `x` `[B, T, C]` into `y` `[B, T, C]` and, asked for it, a state that lets the next call
go on where this one stopped: any split of a sequence into calls gives the result of one call.

Shape letters used in this package: B sequences, T tokens, C hidden size, H query heads, G key/value
heads, D head size, S state slots, N packed documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .context import Context, take_documents
from .errors import LayerError, shown
from .state import MixerState


@dataclass(frozen=True)
class Site:
    """Place of a mixer in a model; a layer used alone is layer 0 of 1."""

    hidden_size: int
    layer: int = 0
    num_layers: int = 1
    first_of_kind: bool = True  # the layer whose values the value residual of its kind shares


@dataclass(frozen=True)
class Flops:
    """FLOPs of the matrix products for one token (2 per multiply-add), visible query-key pairs only."""

    differentiable: float = 0.0
    routing: float = 0.0  # has no backward

    @property
    def forward(self) -> float:
        return self.differentiable + self.routing

    @property
    def training(self) -> float:
        """FLOPs of forward and backward, without recomputation."""
        return 3 * self.differentiable + self.routing

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.differentiable + other.differentiable, self.routing + other.routing)


class Mixer(nn.Module):
    """Base of all token mixers: built as `Kind(options, site)`; a subclass gives `mix` and the counts of
    FLOPs and bytes."""

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
        """Raise LayerError unless a layer with these options can stand at `site`, without building it."""

    @classmethod
    def value_width(cls, options: Any, site: Site) -> int | None:
        """Give the width of the values that the value residual shares within the kind; None if it has
        none."""
        return None

    @classmethod
    def check_sharding(cls, options: Any, site: Site, size: int, tokens: int) -> None:
        """Raise LayerError unless `size` ranks can share rows of `tokens` tokens at this layer.

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
        """Compute the layer. `state` may be written to when gradients are off. A packed row comes here
        without state; with states `mix_documents` takes it apart."""
        raise NotImplementedError

    def mix_documents(self, x: Tensor, context: Context, states: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        """Mix a packed row with a state (or None) for every document, which may be written to as in `mix`.

        Each document is mixed by itself; if the kind is position-free, all of one length are one batch, so
        that decoding reads the weights once.

        Returns:
            `y` `[1, T, C]` and one state per document.
        """
        layer, lengths, count = self.site.layer, context.lengths, len(context.lengths)
        outputs: list[Any] = [None] * count
        after, routes = list(outputs), list(outputs)
        firsts: dict[str, list[Any]] = {}
        for documents in _equal_lengths(lengths) if self.position_free else [[i] for i in range(count)]:
            own, batch = context.batch(documents), take_documents(x, documents, lengths)
            y, state = self.mix(batch, own, self._batch_state([states[i] for i in documents]))
            for row, (i, output) in enumerate(zip(documents, y, strict=True)):
                outputs[i] = output
                after[i] = _document_state(state, row, len(documents), states[i], lengths[i])
            for kind in own.first_values.keys() - context.first_values.keys():
                values = firsts.setdefault(kind, [None] * count)
                for i, value in zip(documents, own.first_values[kind], strict=True):
                    values[i] = value
            routes[documents[0]] = (own.routes or {}).get(layer)
        context.first_values |= {kind: torch.cat(values)[None] for kind, values in firsts.items()}
        context.keep_routes(layer, routes)
        return torch.cat(outputs)[None], after

    def _batch_state(self, states: list[Any]) -> Any:
        """Join the states of documents to that of a batch."""
        if len(states) == 1 or all(state is None for state in states):
            return states[0]
        known = [self.empty_state(1) if state is None else state for state in states]
        return known[0].concatenate(known)

    def _own_states(self, context: Context, states: Any) -> list[Any]:
        """Take the states of a packed row's documents for this call; raise LayerError before any is spent."""
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
        """Raise LayerError unless `x` is `[B, T, C]` in the parameters' dtype (any under autocast)."""
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
        """What a state depends on; it fits other layers of equal facts."""
        options = dataclasses.asdict(self.options)
        return {"kind": self.kind, "hidden_size": self.site.hidden_size} | options

    @cached_property
    def _state_type(self) -> type[MixerState]:
        return type(self.empty_state(1))

    def empty_state(self, batch: int) -> MixerState:
        """Make the state before the first token, on the parameters' device."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters in place (also after meta-device construction)."""
        raise NotImplementedError

    def flops_per_token(self, context_length: int) -> Flops:
        """Count FLOPs as the mean over the positions of one sequence of `context_length` tokens, projections
        included."""
        raise NotImplementedError

    def flops_at(self, position: int) -> Flops:
        """Count FLOPs of decoding the token at `position` (from 0), projections included; work done once a
        chunk is spread over it."""
        raise NotImplementedError

    def state_bytes(self, context_length: int, element_size: int = 4) -> int:
        """Count bytes of one sequence's state after `context_length` tokens, for activations of
        `element_size`."""
        raise NotImplementedError

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Count bytes that all of `size` ranks, which share `rows` rows of `tokens` tokens, send each other
        in one forward pass; the backward pass sends as many.

        A packed row is one row. `element_size`: bytes of an activation.
        """
        raise NotImplementedError

    def no_decay(self) -> set[str]:
        """Name the parameters without weight decay: by default all that are not matrices."""
        return {name for name, parameter in self.named_parameters() if parameter.ndim < 2}


def _equal_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Gather the documents of each length."""
    found: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        found.setdefault(length, []).append(index)
    return list(found.values())


def _document_state(state: Any, row: int, rows: int, before: Any, length: int) -> Any:
    """Take one document's state out of that of a batch of `rows`, at its own position."""
    if state is None or rows == 1:
        return state
    position = length if before is None else before.position + length
    return replace(state.select(slice(row, row + 1)), position=position)
