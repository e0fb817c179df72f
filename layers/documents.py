"""A packed row whose documents go on from states of their own, for mixers that know plain batches only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .context import Context

if TYPE_CHECKING:
    from .base import Mixer

Lengths = tuple[int, ...]


def mix_documents(
    mixer: Mixer, x: Tensor, context: Context, states: Sequence[Any]
) -> tuple[Tensor, list[Any]]:
    """`mixer.mix` for every document of `x` `[1, T, C]`: by itself, or, for a position-free mixer, as one
    batch with all documents of its length (so that decoding reads the weights once).

    Returns:
        `y` `[1, T, C]` and one state per document.
    """
    lengths = context.lengths
    groups = _by_length(lengths) if mixer.position_free else [[i] for i in range(len(lengths))]
    outputs: list[Any] = [None] * len(lengths)
    after: list[Any] = [None] * len(lengths)
    routes: list[Any] = [None] * len(lengths)
    firsts: dict[str, list[Any]] = {}
    for group in groups:
        own = _context(context, group)
        y, state = mixer.mix(_take(x, group, lengths), own, _joined(mixer, [states[i] for i in group]))
        _spread(y, group, outputs)
        for kind in own.first_values.keys() - context.first_values.keys():
            _spread(own.first_values[kind], group, firsts.setdefault(kind, [None] * len(lengths)))
        for row, i in enumerate(group):
            after[i] = _row(state, row, group, states[i], lengths[i])
        routes[group[0]] = (own.routes or {}).get(mixer.site.layer)
    for kind, values in firsts.items():
        context.first_values[kind] = torch.cat(values)[None]
    context.keep_routes(mixer.site.layer, routes)
    return torch.cat(outputs)[None], after


def _context(context: Context, group: Sequence[int]) -> Context:
    """Of some documents of equal length, as a batch; with routes only for a single one."""
    own, lengths = context.alone(group[0]), context.lengths
    if len(group) > 1:
        own.routes = None
    own.first_values = {kind: _take(value, group, lengths) for kind, value in context.first_values.items()}
    if context.embedding is not None:
        own.embedding = _take(context.embedding, group, lengths)
    return own


def _by_length(lengths: Lengths) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        found.setdefault(length, []).append(index)
    return list(found.values())


def _take(row: Tensor, group: Sequence[int], lengths: Lengths) -> Tensor:
    if len(group) == len(lengths):
        return row.reshape(len(group), -1, row.shape[-1])
    pieces = row[0].split(lengths)
    return torch.stack([pieces[i] for i in group])


def _spread(batch: Tensor, group: Sequence[int], places: list[Any]) -> None:
    for i, piece in zip(group, batch, strict=True):
        places[i] = piece


def _joined(mixer: Mixer, states: list[Any]) -> Any:
    if len(states) == 1 or all(state is None for state in states):
        return states[0]
    known = [mixer.empty_state(1) if state is None else state for state in states]
    return known[0].concatenate(known)


def _row(state: Any, row: int, group: Sequence[int], before: Any, length: int) -> Any:
    """One document's state out of its group's, at its own position."""
    if state is None or len(group) == 1:
        return state
    position = length if before is None else before.position + length
    return replace(state.select(slice(row, row + 1)), position=position)
