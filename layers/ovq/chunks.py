"""Many chunks of OVQ attention at once: choose, average, read and attend on rows of one chunk each.

Shapes: R rows (ordered by chunk, then by sequence), L tokens of a chunk, H heads, N centroids, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..base import LayerError
from ..norms import compute_dtype
from ..softmax import Mask, Part, joined_attention
from .dictionary import Centroids, Step, assign, running_means, size_after

GROUP_BYTES = 256 * 2**20
"""Centroids of so many bytes exist at once; longer calls go by groups of chunks, repeated in the backward."""
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
) -> tuple[Tensor, Tensor, Centroids | None]:
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
    recompute = len(groups) > 1 and torch.is_grad_enabled()
    # By `split`, whose backward joins once; that of a slice fills a whole tensor for each.
    rows = [sum(grid.active[c] for c in group) for group in groups]
    entries = [sum(grid.complete[group.start : group.stop]) for group in groups]
    pieces = [*(x.split(rows) for x in (q, k, v)), *(x.split(entries) for x in (tokens, slot))]
    outs = []
    for group, args in zip(groups, zip(*pieces, strict=True), strict=True):
        run = partial(_group, call, grid.part(group))
        if recompute:
            y, base = checkpoint(run, *args, base, use_reentrant=False, preserve_rng_state=False)
        else:
            y, base = run(*args, base)
        outs.append(y)
    return torch.cat(outs) if len(outs) > 1 else outs[0], slot, base


def _steps(call: Call, grid: Grid) -> list[Step]:
    return [
        Step(count, call.size(number), call.size(number + 1))
        for number, count in enumerate(grid.complete, grid.first)
    ]


def _groups(call: Call, grid: Grid, tokens: Tensor) -> list[range]:
    """Chunks whose dictionaries fit into GROUP_BYTES together."""
    centroid = 2 * tokens.shape[1] * tokens.shape[3] * tokens.element_size()  # as means and as read
    borders, used = [0], 0
    for chunk, count in enumerate(grid.active):
        size = count * call.size(grid.first + chunk + 1) * centroid
        if used and used + size > GROUP_BYTES:
            borders.append(chunk)
            used = 0
        used += size
    return [range(start, end) for start, end in zip(borders, [*borders[1:], len(grid.active)], strict=True)]


def _group(
    call: Call,
    grid: Grid,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    slot: Tensor,
    base: Centroids | None,
) -> tuple[Tensor, Centroids | None]:
    """One group of chunks: their heads, and the dictionary after the last step."""
    reads, parts, steps = [], [Part(mask=Mask.LOWER)], _steps(call, grid)
    if base is not None and call.size(grid.first):
        count = grid.active[0]
        reads.append(readable(base.rows(slice(0, count)).first(call.size(grid.first)), q.dtype))
        parts.append(Part(slice(0, count), k_rows=slice(0, count), key=1))
    if not steps:
        return attend(q, k, v, reads, parts), base
    after = running_means(tokens, slot, steps, base)
    if len(grid.active) > 1 and call.size(grid.first + len(grid.active) - 1):
        parts += _dictionary_parts(call, grid, key=len(reads) + 1)
        reads.append(readable(after, q.dtype))
    last = slice(len(slot) - steps[-1].sequences, None)
    return attend(q, k, v, reads, parts), Centroids(*(x.clone() for x in after.rows(last)))


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


def attend(
    q: Tensor, k: Tensor, v: Tensor, reads: Sequence[tuple[Tensor, Tensor]], parts: list[Part]
) -> Tensor:
    """One softmax over tokens (`key` 0 of the parts) and what `readable` made of centroids (1, ...)."""
    if not reads:
        return joined_attention([q], [k], [v], parts, 1.0)[0]
    size = q.shape[-1]
    more = reads[0][0].shape[-1] - size
    ones = q.new_ones(*q.shape[:-1], 2)
    q = F.pad(torch.cat((q, ones), -1), (0, more - 2))
    keys, values = (list(x) for x in zip((F.pad(k, (0, more)), F.pad(v, (0, more))), *reads, strict=True))
    return joined_attention([q], keys, values, parts, 1.0)[0][..., :size]


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
