"""OVQ's dictionary of centroids: how it grows, which centroid takes a token, and their running means.

A centroid is the mean of all keys (and of all values) ever assigned to it. Whole chunks of tokens are
assigned at once; the choice carries no gradient and is the one sequential part. The means after every chunk
are then prefix sums over chunks, divided by counts.

Shapes: R rows (chunks that enter, ordered by chunk, then by sequence), H heads, L tokens of a chunk, N
centroids, D head size, W = 2 D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import LayerError


class Centroids(NamedTuple):
    """A dictionary: means `[.., H, N, 2 D]`, keys beside values, and counts `[.., H, N, 1]`, both in at least
    fp32. Of centroids that do not exist both are 0."""

    means: Tensor
    counts: Tensor

    def first(self, size: int) -> Centroids:
        return Centroids(*(x[..., :size, :] for x in self))

    def rows(self, index: slice) -> Centroids:
        return Centroids(*(x[index] for x in self))


class Step(NamedTuple):
    """One chunk of the first `sequences` sequences enters the dictionary."""

    number: int  # of the chunk
    sequences: int
    before: int  # centroids
    after: int


@dataclass
class Routes:
    """The centroid of every token of the chunks that a call completed; packed documents follow each other."""

    slot: Tensor
    """int32 `[B, H, A]`."""
    first: int = 0
    """Position of the first of the A tokens."""


@dataclass(frozen=True)
class Call:
    """What one call of the operator needs everywhere."""

    chunk: int
    limit: int
    """Most centroids."""
    replay: Routes | None
    places: Sequence[tuple[int, int]]
    """For each sequence, row and place in given routes of its position 0."""

    def size(self, chunks: int) -> int:
        """Count the centroids after so many chunks."""
        return size_after(chunks, self.chunk, self.limit)

    def step(self, number: int, sequences: int) -> Step:
        """Describe how chunk `number` of the first `sequences` sequences enters."""
        return Step(number, sequences, self.size(number), self.size(number + 1))


def size_after(chunks: int, chunk: int, limit: int) -> int:
    """Count the centroids after so many chunks of `chunk` tokens: `t M / (t + M)` rounded down, M being
    `limit`."""
    tokens = chunks * chunk
    return int(tokens * limit / (tokens + limit))


def choose(call: Call, keys: Tensor, steps: Sequence[Step], base: Centroids | None) -> Tensor:
    """Choose the centroids of entering tokens (see `assign`), or take the given ones: int64 `[R, H, L]`."""
    if call.replay is None:
        return assign(keys, steps, base)
    given, found = call.replay, []
    for step in steps:
        for row, place in call.places[: step.sequences]:
            begin = place + step.number * call.chunk - given.first
            if begin < 0 or begin + call.chunk > given.slot.shape[2]:
                raise LayerError(
                    f"the given routes are for {given.slot.shape[2]} tokens from {given.first} on; this call "
                    f"needs them for {call.chunk} from {begin + given.first} on"
                )
            found.append(given.slot[row, :, begin : begin + call.chunk])
    return torch.stack(found).long()


@torch.no_grad()
def assign(keys_RHLD: Tensor, steps: Sequence[Step], base: Centroids | None = None) -> Tensor:
    """Assign every entering token to a centroid: int64 `[R, H, L]`.

    Every token goes to the centroid whose mean key has the largest product with its own; then the tokens
    least like any become the new centroids, the least like first. Where there is no centroid yet, tokens are
    compared with the chunk's first one, which founds centroid 0.

    Args:
        keys_RHLD: normalised keys, in fp32 or wider.
        base: the dictionary before the first step; None when nothing has entered yet.
    """
    heads, size = keys_RHLD.shape[1], keys_RHLD.shape[3]
    room = max(1, steps[-1].after)  # a dictionary of size 0 gathers in centroid 0, unseen
    sums = keys_RHLD.new_zeros(steps[0].sequences, heads, room, size)
    number = keys_RHLD.new_zeros(steps[0].sequences, heads, room, 1)
    if base is not None:
        means, counts = base.first(room)
        held = slice(0, counts.shape[2])
        sums[:, :, held] += means[..., :size] * counts
        number[:, :, held] += counts
    slots, row = [], 0
    for step in steps:
        keys = keys_RHLD[row : row + step.sequences]
        row += step.sequences
        sums, number = sums[: step.sequences], number[: step.sequences]
        known = sums[:, :, : step.before] / number[:, :, : step.before]
        slot = _choose(keys, known, step)
        slots.append(slot)
        if step is not steps[-1]:
            place = _places(slot, room)
            sums.view(-1, size).index_add_(0, place, keys.flatten(0, 2))
            number.view(-1).index_add_(0, place, number.new_ones(len(place)))
    return torch.cat(slots)


def _choose(keys: Tensor, known: Tensor, step: Step) -> Tensor:
    """Assign the tokens of one step, given the centroids' keys `known` `[n, H, N, D]`."""
    new = step.after - step.before
    if step.before:
        best, slot = (keys @ known.mT).max(-1)
        founders = best.argsort(dim=-1, stable=True)[..., :new]
        first = step.before
    else:
        slot = torch.zeros(keys.shape[:-1], dtype=torch.int64, device=keys.device)
        if new < 2:
            return slot
        likeness = (keys[:, :, 1:] @ keys[:, :, 0, :, None]).squeeze(-1)
        founders = 1 + likeness.argsort(dim=-1, stable=True)[..., : new - 1]
        first = 1
    names = torch.arange(first, first + founders.shape[-1], device=keys.device)
    return slot.scatter(-1, founders, names.expand_as(founders))


def running_means(
    tokens_RHLW: Tensor, slot_RHL: Tensor, steps: Sequence[Step], base: Centroids | None = None
) -> Centroids:
    """Average the tokens to the dictionary after each step, `[R, H, N, ...]`, N being the size after the last
    one (at least 1).

    Args:
        tokens_RHLW: what is averaged, keys beside values, in fp32 or wider.
        base: the dictionary before the first step; None when nothing has entered yet.
    """
    room = max(1, steps[-1].after)
    rows = [step.sequences for step in steps]
    place = _places(slot_RHL, room)
    ones = tokens_RHLW.new_ones(*tokens_RHLW.shape[:3], 1)
    sums = counts = None
    if base is not None:
        means, counts = base.first(room)
        sums = means * counts
    number = _prefix_sums(ones, place, rows, room, counts)
    return Centroids(_Means.apply(tokens_RHLW, place, rows, number, sums), number)


def _places(slot: Tensor, room: int) -> Tensor:
    """Find the row of each token in centroids flattened from `[R, H, room, ...]`."""
    rows, heads, _ = slot.shape
    first = torch.arange(rows * heads, device=slot.device).view(rows, heads, 1) * room
    return (slot + first).flatten()


def _prefix_sums(tokens: Tensor, place: Tensor, rows: list[int], room: int, before: Tensor | None) -> Tensor:
    """Scatter tokens to their centroids, then add up over steps: the rows of a step are the first sequences
    of the step before."""
    width = tokens.shape[-1]
    sums = tokens.new_zeros(len(tokens) * tokens.shape[1] * room, width)
    sums = sums.index_add_(0, place, tokens.flatten(0, 2)).view(*tokens.shape[:2], room, width)
    blocks = sums.split(rows)
    if before is not None:
        blocks[0][:, :, : before.shape[2]] += before[: rows[0]]
    for last, this in pairwise(blocks):
        this += last[: len(this)]
    return sums


class _Means(torch.autograd.Function):
    """Linear in the tokens, as counts are no function of them: the backward needs places and counts only."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, place: Tensor, rows: list[int], counts: Tensor, before: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(place, counts)
        ctx.rows, ctx.shape = rows, tokens.shape
        ctx.before = None if before is None else before.shape
        return _prefix_sums(tokens, place, rows, counts.shape[2], before).div_(counts.clamp_min(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, counts = ctx.saved_tensors
        sums = (grad / counts.clamp_min(1)).contiguous()
        blocks = sums.split(ctx.rows)
        for this, after in pairwise(reversed(blocks)):
            after[: len(this)].add_(this)
        tokens = sums.view(-1, sums.shape[-1]).index_select(0, place).view(ctx.shape)
        before = None
        if ctx.before is not None:
            before = sums.new_zeros(ctx.before)
            before[: ctx.rows[0]] = blocks[0][:, :, : before.shape[2]]
        return tokens, None, None, None, before
