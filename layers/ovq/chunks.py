"""Many chunks of OVQ attention at once: choose, average, read and attend on rows of one chunk each.

Shapes: R rows (ordered by chunk, then by sequence), L tokens of a chunk, H heads, N centroids, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import LayerError
from ..norms import compute_dtype
from ..softmax import Mask, Part, joined_attention
from ..softmax.joined import Gradient, Joint, part_gradients
from ..softmax.kernels import choose as choose_kernel
from .dictionary import Centroids, Step, assign, running_means, size_after

GROUP_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Centroids of so many bytes exist at once, as means and as read; longer calls go by groups of chunks."""
SLACK = 1.25
"""Chunks whose dictionaries differ by less than this factor are one block of attention, missing centroids
being hidden."""
HIDDEN = -1e4  # a logit whose exponential is 0 and which every dtype holds


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
    """Of the dictionary's size."""
    replay: Routes | None = None

    def size(self, chunks: int) -> int:
        """Centroids after so many chunks."""
        return size_after(chunks, self.chunk, self.limit)


@dataclass(frozen=True)
class Grid:
    """Rows of one chunk each, ordered by chunk, then by sequence. A chunk's sequences are the first ones of
    the chunk before."""

    active: list[int]  # per chunk, how many sequences have tokens in it
    complete: list[int]  # per chunk, how many fill it, as far as any does
    first: int = 0  # the first chunk's number

    def start(self, chunk: int) -> int:
        """Row of the chunk's first sequence."""
        return sum(self.active[:chunk])

    def places(self, sequence: int, tokens: int, chunk: int) -> Tensor:
        """Of a sequence's tokens, in the flattened rows."""
        at = torch.arange(tokens)
        starts = torch.tensor([self.start(c) for c in range(len(self.active))])
        return (starts[at // chunk] + sequence) * chunk + at % chunk

    def entering(self) -> list[int]:
        """Rows of complete chunks."""
        return [self.start(c) + s for c, count in enumerate(self.complete) for s in range(count)]

    def entered(self, sequence: int) -> list[int]:
        """Of the entering rows, those of one sequence."""
        found = [c for c, count in enumerate(self.complete) if sequence < count]
        return [sum(self.complete[:c]) + sequence for c in found]

    def part(self, chunks: range) -> Grid:
        """Only these chunks."""
        span = slice(chunks.start, chunks.stop)
        return Grid(self.active[span], self.complete[span], self.first + chunks.start)


def choose(
    call: Call,
    keys: Tensor,
    steps: Sequence[Step],
    base: Centroids | None,
    starts: Sequence[tuple[int, int]],
) -> Tensor:
    """Centroids of entering tokens, chosen or as given: int64 `[R, H, L]`.

    Args:
        keys: `[R, H, L, D]`, in fp32 or wider.
        base: the dictionary before the first step.
        starts: for each sequence, row and position in given routes of its first step's first token.
    """
    if call.replay is None:
        return assign(keys, steps, base)
    given, found = call.replay, []
    for number, step in enumerate(steps):
        for row, position in starts[: step.sequences]:
            begin = position + number * call.chunk - given.first
            if begin < 0 or begin + call.chunk > given.slot.shape[2]:
                raise LayerError(
                    f"the given routes are for {given.slot.shape[2]} tokens from {given.first} on; this call "
                    f"needs them for {call.chunk} from {begin + given.first} on"
                )
            found.append(given.slot[row, :, begin : begin + call.chunk])
    return torch.stack(found).long()


def entering_tokens(keys: Tensor, values: Tensor) -> Tensor:
    """What enters the dictionary, keys beside values: rows `[R, L, H, D]` to `[R, H, L, 2 D]`."""
    return torch.cat((keys, values), -1).transpose(1, 2).to(compute_dtype(keys))


def chunks(
    call: Call,
    grid: Grid,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    base: Centroids | None,
    starts: Sequence[tuple[int, int]],
) -> tuple[Tensor, Tensor, Centroids]:
    """All steps for rows `[R, L, H, D]` of q, k and v.

    Args:
        base: the dictionary before the first chunk; None where nothing has entered yet.
        starts: see `choose`.

    Returns:
        Heads like q, the entering rows' centroids `[R', H, L]`, and the dictionary after the last step.
    """
    entering = grid.entering()
    tokens_k, tokens_v = (k, v) if len(entering) == len(k) else (k[entering], v[entering])
    tokens = entering_tokens(tokens_k, tokens_v)
    slot = choose(call, tokens[..., : k.shape[-1]], _steps(call, grid), base, starts)
    groups = _groups(call, grid, tokens)
    # By `split`, whose backward joins once; that of a slice fills a whole tensor for each.
    rows = [sum(grid.active[c] for c in group) for group in groups]
    entries = [sum(grid.complete[group.start : group.stop]) for group in groups]
    pieces = [*(x.split(rows) for x in (q, k, v)), *(x.split(entries) for x in (tokens, slot))]
    outs = []
    for group, operands in zip(groups, zip(*pieces, strict=True), strict=True):
        y, *after = _Group.apply(call, grid.part(group), *operands, *(base or (None, None)))
        base = Centroids(*after)
        outs.append(y)
    assert base is not None
    return torch.cat(outs) if len(outs) > 1 else outs[0], slot, base


def _steps(call: Call, grid: Grid) -> list[Step]:
    return [
        Step(count, call.size(number), call.size(number + 1))
        for number, count in enumerate(grid.complete, grid.first)
    ]


def _groups(call: Call, grid: Grid, tokens: Tensor) -> list[range]:
    """Chunks whose dictionaries fit into GROUP_BYTES together."""
    centroid = 2 * tokens.shape[1] * tokens.shape[3] * tokens.element_size()  # as means and as read
    limit = GROUP_BYTES["cpu" if tokens.device.type == "cpu" else "cuda"]
    borders, used = [0], 0
    for chunk, count in enumerate(grid.active):
        size = count * call.size(grid.first + chunk + 1) * centroid
        if used and used + size > limit:
            borders.append(chunk)
            used = 0
        used += size
    return [range(start, end) for start, end in zip(borders, [*borders[1:], len(grid.active)], strict=True)]


class _Group(torch.autograd.Function):
    """One group of chunks. The backward makes the centroids again, but not the attention."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        grid: Grid,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Tensor,
        slot: Tensor,
        means: Tensor | None,
        counts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads like q, and the dictionary after the last step; `means`, `counts`: the one before."""
        base = None if means is None or counts is None else Centroids(means, counts)
        reads, parts, last = _dictionary(call, grid, tokens, slot, base, q.dtype)
        queries, keys, values = _widened(q, k, v, reads)
        joint, kernel = Joint(queries), choose_kernel(queries)
        joint.add(kernel, [queries], keys, values, [Part(mask=Mask.LOWER), *parts], 1.0)
        y, lse = joint.result()
        y = y[..., : q.shape[-1]].contiguous()
        ctx.save_for_backward(q, k, v, tokens, slot, means, counts, y, lse)
        ctx.plan = call, grid, kernel
        after = [x.clone() for x in last]
        ctx.mark_non_differentiable(after[1])
        return y, after[0], after[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_means: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        call, grid, kernel = ctx.plan
        q, k, v, tokens, slot, means, counts, y, lse = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in (tokens, means) if x is not None]
        base = None if means is None else Centroids(leaves[1], counts)
        with torch.autocast(q.device.type, enabled=False):
            with torch.enable_grad():
                reads, parts, last = _dictionary(call, grid, leaves[0], slot, base, q.dtype)
            seen = [(keys.detach(), values.detach()) for keys, values in reads]
            queries, all_keys, all_values = _widened(q, k, v, seen)
            more = (0, queries.shape[-1] - q.shape[-1])
            d_q = Gradient(queries)
            d_keys, d_values = [Gradient(x) for x in all_keys], [Gradient(x) for x in all_values]
            part_gradients(
                kernel,
                (F.pad(grad, more), F.pad(y, more), lse),
                [queries],
                all_keys,
                all_values,
                [Part(mask=Mask.LOWER), *parts],
                1.0,
                ([d_q], d_keys, d_values),
            )
            own = (x.result()[..., : q.shape[-1]] for x in (d_q, d_keys[0], d_values[0]))
            made = [*(x for read in reads for x in read), last.means]
            slopes = [x.result() for pair in zip(d_keys[1:], d_values[1:], strict=True) for x in pair]
            found = torch.autograd.grad(made, leaves, [*slopes, grad_means], allow_unused=True)
        d_tokens, d_means = (*found, None)[:2]
        return None, None, *own, d_tokens, None, d_means, None


Read = tuple[Tensor, Tensor]  # keys and values, from `readable`


def _dictionary(
    call: Call, grid: Grid, tokens: Tensor, slot: Tensor, base: Centroids | None, dtype: torch.dtype
) -> tuple[list[Read], list[Part], Centroids]:
    """What a group's chunks read beside themselves, who reads it, and the dictionary after the last step."""
    reads: list[Read] = []
    parts: list[Part] = []
    steps = _steps(call, grid)
    if base is not None and call.size(grid.first):
        count = grid.active[0]
        reads.append(readable(base.rows(slice(0, count)).first(call.size(grid.first)), dtype))
        parts.append(Part(slice(0, count), k_rows=slice(0, count), key=1))
    if not steps:
        assert base is not None
        return reads, parts, base
    after = running_means(tokens, slot, steps, base)
    if len(grid.active) > 1 and call.size(grid.first + len(grid.active) - 1):
        parts += _dictionary_parts(call, grid, key=len(reads) + 1)
        reads.append(readable(after, dtype))
    return reads, parts, after.rows(slice(len(slot) - steps[-1].sequences, None))


def _dictionary_parts(call: Call, grid: Grid, key: int) -> list[Part]:
    """Every chunk but the first over the centroids after the chunk before it; successive ones with nearly as
    many centroids are one part, the smaller ones' missing centroids being hidden."""
    parts: list[Part] = []
    row = smallest = 0
    for chunk in range(1, len(grid.active)):
        size, count, start = call.size(grid.first + chunk), grid.active[chunk], grid.start(chunk)
        q_rows, k_rows = slice(start, start + count), slice(row, row + count)
        row += grid.complete[chunk - 1]
        if not size:
            continue
        last = parts[-1].k_rows if parts else None
        if isinstance(last, slice) and last.stop == k_rows.start and size <= SLACK * smallest:
            before = parts.pop()
            assert isinstance(before.q_rows, slice)
            q_rows, k_rows = slice(before.q_rows.start, q_rows.stop), slice(last.start, k_rows.stop)
        else:
            smallest = size
        parts.append(Part(q_rows, k_rows=k_rows, k_tokens=slice(0, size), key=key))
    return parts


def attend(q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Read], parts: list[Part]) -> Tensor:
    """One softmax over tokens (`key` 0 of the parts) and what `readable` made of centroids (1, ...)."""
    queries, keys, values = _widened(q, k, v, reads)
    return joined_attention([queries], keys, values, parts, 1.0)[0][..., : q.shape[-1]]


def _widened(
    q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Read]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Queries, keys and values with the further features that `readable` has, if there are any."""
    if not reads:
        return q, [k], [v]
    more = reads[0][0].shape[-1] - q.shape[-1]
    ones = q.new_ones(*q.shape[:-1], 2)
    q = F.pad(torch.cat((q, ones), -1), (0, more - 2))
    keys, values = zip((F.pad(k, (0, more)), F.pad(v, (0, more))), *reads, strict=True)
    return q, list(keys), list(values)


def readable(centroids: Centroids, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[R, N, H, D + more]` of centroids, for queries whose first two further features are 1.

    The key's two hold log n in two summands, as 16 bits are too few for it. Kernels want heads of a multiple
    of 8 features.
    """
    means, counts = centroids
    size = means.shape[-1] // 2
    more = 2 + -(size + 2) % 8
    bias = torch.where(counts > 0, counts.clamp_min(1).log(), HIDDEN)
    high = bias.to(dtype)
    low = (bias - high).to(dtype)
    keys, values = means.to(dtype).split(size, -1)
    keys = F.pad(torch.cat((keys, high, low), -1), (0, more - 2))
    return keys.transpose(1, 2), F.pad(values, (0, more)).transpose(1, 2)
