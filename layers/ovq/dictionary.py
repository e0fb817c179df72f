"""OVQ's dictionary of centroids: how it grows, which centroid takes a token, and their running means.

A centroid is the mean of all keys (and of all values) ever assigned to it. Whole chunks of tokens are
assigned at once; the choice carries no gradient.

Shapes: R rows (chunks that enter, ordered by chunk, then by sequence), H heads, L tokens of a chunk, N
centroids, D head size, W = 2 D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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

    def choose(self, keys: Tensor, known: Centroids, step: Step) -> Tensor:
        """Choose the centroids of a step's tokens (see `assign`), or take the given ones."""
        if self.replay is None:
            return assign(keys, known, step)
        given, found = self.replay, []
        for row, place in self.places[: step.sequences]:
            begin = place + step.number * self.chunk - given.first
            if begin < 0 or begin + self.chunk > given.slot.shape[2]:
                raise LayerError(
                    f"the given routes are for {given.slot.shape[2]} tokens from {given.first} on; this call "
                    f"needs them for {self.chunk} from {begin + given.first} on"
                )
            found.append(given.slot[row, :, begin : begin + self.chunk])
        return torch.stack(found).long()


def size_after(chunks: int, chunk: int, limit: int) -> int:
    """Count the centroids after so many chunks of `chunk` tokens: `t M / (t + M)` rounded down, M being
    `limit`."""
    tokens = chunks * chunk
    return int(tokens * limit / (tokens + limit))


def assign(keys: Tensor, known: Centroids, step: Step) -> Tensor:
    """Assign the tokens of one step to centroids: int64 `[n, H, L]`.

    Every token goes to the centroid whose mean key has the largest product with its own; then the tokens
    least like any become the new centroids, the least like first. Where there is no centroid yet, tokens are
    compared with the chunk's first one, which founds centroid 0.

    Args:
        keys: `[n, H, L, D]`, normalised, in fp32 or wider.
        known: the dictionary before the step, with sums in place of means.
    """
    new = step.after - step.before
    if step.before:
        sums, counts = known.first(step.before)
        best, slot = (keys @ (sums[..., : keys.shape[-1]] / counts).mT).max(-1)
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


def advance(
    call: Call, steps: Sequence[Step], tokens_RHLW: Tensor, base: Centroids, slot: Tensor | None = None
) -> tuple[Centroids, Tensor]:
    """Let the tokens of some steps enter the dictionary.

    Args:
        tokens_RHLW: keys beside values, in fp32 or wider.
        base: the dictionary before the first step.
        slot: the tokens' centroids, where they are known.

    Returns:
        The dictionary before the first step and after each one, `[n + R, H, N, ...]`, N being the size after
        the last one (at least 1); and the tokens' centroids, int64 `[R, H, L]`.
    """
    means, counts, slot = _Advance.apply(call, steps, slot, tokens_RHLW, *base)
    return Centroids(means, counts), slot


class _Advance(torch.autograd.Function):
    """`advance`. Means are linear in tokens and earlier means, as counts and choices carry no gradient: the
    backward needs only these two."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, steps: Sequence[Step], slot: Tensor | None, *operands: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, means, counts = operands
        # A dictionary of size 0 gathers in centroid 0, unseen.
        room = max(1, steps[-1].after) if steps else counts.shape[2]
        rows = [len(means), *(step.sequences for step in steps)]
        width = tokens.shape[-1]
        sums, number = (tokens.new_zeros(sum(rows), tokens.shape[1], room, size) for size in (width, 1))
        blocks = [Centroids(*pair) for pair in zip(sums.split(rows), number.split(rows), strict=True)]
        for own, held in zip(blocks[0], Centroids(means * counts, counts).first(room), strict=True):
            own[:, :, : held.shape[2]] = held
        entering = tokens.split(rows[1:]) if steps else ()
        slots = [] if slot is None else list(slot.split(rows[1:]))
        for index, (step, keys_values) in enumerate(zip(steps, entering, strict=True)):
            after = blocks[index + 1]
            for own, before in zip(after, blocks[index], strict=True):
                own.copy_(before[: step.sequences])
            if slot is None:
                slots.append(call.choose(keys_values[..., : width // 2], after, step))
            place = _places(slots[index], room)
            after.means.view(-1, width).index_add_(0, place, keys_values.flatten(0, 2))
            after.counts.view(-1).index_add_(0, place, number.new_ones(len(place)))
        slot = torch.cat(slots) if slots else tokens[..., 0].long()
        ctx.save_for_backward(slot, number, counts)
        ctx.rows = rows
        ctx.mark_non_differentiable(number, slot)
        return sums.div_(number.clamp_min(1)), number, slot

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        slot, number, counts = ctx.saved_tensors
        room = number.shape[2]
        d_sums = (grad / number.clamp_min(1)).contiguous()
        blocks = d_sums.split(ctx.rows)
        for after, before in pairwise(reversed(blocks)):
            before[: len(after)] += after
        d_entered = d_sums[ctx.rows[0] :].reshape(-1, d_sums.shape[-1])
        d_tokens = d_entered.index_select(0, _places(slot, room)).unflatten(0, slot.shape)
        d_means = F.pad(blocks[0], (0, 0, 0, counts.shape[2] - room)) * counts
        return None, None, None, d_tokens, d_means, None


def _places(slot: Tensor, room: int) -> Tensor:
    """Find the row of each token in centroids flattened from `[R, H, room, ...]`."""
    rows, heads, _ = slot.shape
    first = torch.arange(rows * heads, device=slot.device).view(rows, heads, 1) * room
    return (slot + first).flatten()
