"""Many chunks of OVQ attention at once: assign, average, read and attend on rows of one chunk each.

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

from ..backends import full_precision
from ..indices import index
from ..norms import compute_dtype
from ..softmax import Mask, Part, joined_attention
from ..softmax.grid import ChunkGrid, rows
from ..softmax.joined import Gradient, Joint, Rows, part_gradients
from ..softmax.kernels import choose as choose_kernel
from .dictionary import Call, Centroids, Step, advance

GROUP_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Centroids of so many bytes exist at once, as means and as read; longer calls go by groups of chunks."""
SLACK = 1.25
"""Chunks whose dictionaries differ by less than this factor are one block of attention, missing centroids
being hidden."""
HIDDEN = -1e4  # a logit whose exponential is 0 and which every dtype holds

Read = tuple[Tensor, Tensor]  # keys and values, from `readable`


@dataclass(frozen=True)
class ChunkRows:
    """Rows of one chunk each, ordered by chunk, then by sequence, the longest sequence first."""

    active: list[int]  # per chunk, how many sequences have tokens in it
    steps: list[Step]  # of complete chunks

    @classmethod
    def of(cls, call: Call, lengths: Sequence[int], first: int) -> ChunkRows:
        """Lay out sequences of `lengths` tokens, the longest first, from chunk number `first` on."""
        active = [sum(n > start for n in lengths) for start in range(0, lengths[0], call.chunk)]
        ends = range(call.chunk, lengths[0] + 1, call.chunk)
        counts = [sum(n >= end for n in lengths) for end in ends]
        return cls(active, [call.step(number, count) for number, count in enumerate(counts, first)])

    def start(self, chunk: int) -> int:
        """Find the row of the chunk's first sequence."""
        return sum(self.active[:chunk])

    def entering(self) -> list[int]:
        """List the rows of complete chunks."""
        return [self.start(c) + s for c, step in enumerate(self.steps) for s in range(step.sequences)]

    def entered(self, sequence: int) -> list[int]:
        """List those of the entering rows that are of one sequence."""
        counts = [step.sequences for step in self.steps if sequence < step.sequences]
        return [sum(counts[:c]) + sequence for c in range(len(counts))]

    def part(self, chunks: slice) -> ChunkRows:
        """Take these chunks only."""
        return ChunkRows(self.active[chunks], self.steps[chunks])


def on_grid(
    call: Call, grid: ChunkGrid, lengths: Sequence[int], qkv: tuple[Tensor, ...], base: Centroids
) -> tuple[Tensor, list[Tensor], Centroids]:
    """Compute all chunks of sequences of `lengths` tokens, the longest first, that lie in `grid`.

    Args:
        qkv: queries, keys and values by token, `[B, T, H, D]`.
        base: the sequences' dictionaries before the first chunk.

    Returns:
        Heads by token, for each sequence the centroids `[H, A]` of the tokens that entered, and the
        dictionary after the last step.
    """
    first = grid.spans[0].first
    whole = ChunkRows.of(call, lengths, first)
    places = [grid.spans[s].query(c) for c, n in enumerate(whole.active, first) for s in range(n)]
    device, entering = qkv[0].device, whole.entering()
    order, entered = rows(places, device), index(tuple(entering), device)
    q, k, v = (_select(grid.queries(x), order) for x in qkv)
    whole_chunks = (k, v) if len(entering) == len(k) else (_select(x, entered) for x in (k, v))
    tokens = entering_tokens(*whole_chunks)
    groups = _groups(call, whole, first, tokens)
    # By `split`, whose backward joins once; that of a slice fills a whole tensor for each.
    sizes = [sum(whole.active[group]) for group in groups]
    entries = [sum(step.sequences for step in whole.steps[group]) for group in groups]
    pieces = [*(x.split(sizes) for x in (q, k, v)), tokens.split(entries)]
    outs, slots = [], []
    for group, operands in zip(groups, zip(*pieces, strict=True), strict=True):
        out, slot, *after = _Group.apply(call, whole.part(group), first + group.start, *operands, *base)
        base = Centroids(*after)
        outs.append(out)
        slots.append(slot)
    y, slot = (torch.cat(x) if len(x) > 1 else x[0] for x in (outs, slots))
    y = y if isinstance(order, slice) else _select(y, order.argsort())
    own = [whole.entered(s) for s in range(len(lengths))]
    slot = _select(slot, index(tuple(row for rows in own for row in rows), device))
    by_sequence = [one.transpose(0, 1).flatten(1) for one in slot.split([len(rows) for rows in own])]
    return grid.tokens_of(y), by_sequence, base


def _select(x: Tensor, order: Rows) -> Tensor:
    return x[order] if isinstance(order, slice) else x.index_select(0, order)


def entering_tokens(keys: Tensor, values: Tensor) -> Tensor:
    """Put what enters the dictionary, keys beside values, from rows `[R, L, H, D]` to `[R, H, L, 2 D]`."""
    return torch.cat((keys, values), -1).transpose(1, 2).to(compute_dtype(keys))


def _groups(call: Call, whole: ChunkRows, first: int, tokens: Tensor) -> list[slice]:
    """Divide the chunks into groups whose dictionaries fit into GROUP_BYTES."""
    centroid = 2 * tokens.shape[1] * tokens.shape[3] * tokens.element_size()  # as means and as read
    limit = GROUP_BYTES["cpu" if tokens.device.type == "cpu" else "cuda"]
    borders, used = [0], 0
    for chunk, count in enumerate(whole.active):
        size = count * call.size(first + chunk + 1) * centroid
        if used and used + size > limit:
            borders.append(chunk)
            used = 0
        used += size
    ends = [*borders[1:], len(whole.active)]
    return [slice(start, end) for start, end in zip(borders, ends, strict=True)]


class _Group(torch.autograd.Function):
    """One group of chunks, from chunk number `first` on. Its backward makes the centroids again, but neither
    chooses nor attends."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, own: ChunkRows, first: int, *operands: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Give heads like q, the entering tokens' centroids, and the dictionary after the last step.

        `operands`: q, k, v and entering tokens; means and counts of the dictionary before the first step.
        """
        q, k, v, tokens, *base = operands
        read, parts, last, slot = _dictionary(call, own, first, tokens, Centroids(*base), q.dtype)
        queries, keys, values = _widened(q, k, v, read)
        joint, kernel = Joint(queries), choose_kernel(queries)
        joint.add(kernel, [queries], keys, values, parts, 1.0)
        y, lse = joint.result()
        y = y[..., : q.shape[-1]].contiguous()
        ctx.save_for_backward(*operands, slot, y, lse)
        ctx.plan = call, own, first, kernel
        means, counts = (x.clone() for x in last)
        ctx.mark_non_differentiable(slot, counts)
        return y, slot, means, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any, grad_means: Tensor, __: Any) -> tuple[Tensor | None, ...]:
        call, own, first, kernel = ctx.plan
        q, k, v, tokens, means, counts, slot, y, lse = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in (tokens, means)]
        base = Centroids(leaves[1], counts)
        with torch.autocast(q.device.type, enabled=False), full_precision(q):
            with torch.enable_grad():
                read, parts, last, _ = _dictionary(call, own, first, leaves[0], base, q.dtype, slot)
            seen = None if read is None else (read[0].detach(), read[1].detach())
            queries, keys, values = _widened(q, k, v, seen)
            more = (0, queries.shape[-1] - q.shape[-1])
            joint = F.pad(grad, more), F.pad(y, more), lse
            d_q, d_keys, d_values = ([Gradient(x) for x in given] for given in ([queries], keys, values))
            part_gradients(kernel, joint, [queries], keys, values, parts, 1.0, (d_q, d_keys, d_values))
            d_qkv = (x[0].result()[..., : q.shape[-1]] for x in (d_q, d_keys, d_values))
            d_read = [x.result() for x in (*d_keys[1:], *d_values[1:])]
            made, d_made = [*(read or ()), last.means], [*d_read, grad_means]
            d_leaves = torch.autograd.grad(made, leaves, d_made, allow_unused=True)
        return None, None, None, *d_qkv, *d_leaves, None


def _dictionary(
    call: Call,
    own: ChunkRows,
    first: int,
    tokens: Tensor,
    base: Centroids,
    dtype: torch.dtype,
    slot: Tensor | None = None,
) -> tuple[Read | None, list[Part], Centroids, Tensor]:
    """Make the dictionary that a group's chunks read, if they read any; who reads what of it and of the
    tokens; the dictionary after the last step; and the entering tokens' centroids, where `slot` does not give
    them."""
    after, slot = advance(call, own.steps, tokens, base.rows(slice(0, own.active[0])), slot)
    parts = [Part(mask=Mask.LOWER), *_dictionary_parts(call, own, first)]
    read = readable(after, dtype) if len(parts) > 1 else None
    last = own.steps[-1].sequences if own.steps else own.active[0]
    return read, parts, after.rows(slice(len(after.counts) - last, None)), slot


def _dictionary_parts(call: Call, own: ChunkRows, first: int) -> list[Part]:
    """Show every chunk the centroids before it; successive ones with nearly as many centroids are one part,
    the smaller ones' missing centroids being hidden."""
    parts: list[Part] = []
    row = smallest = 0
    entered = [own.active[0], *(step.sequences for step in own.steps)]
    for chunk, count in enumerate(own.active):
        size, start = call.size(first + chunk), own.start(chunk)
        q_rows, k_rows = slice(start, start + count), slice(row, row + count)
        row += entered[chunk]
        if not size:
            continue
        last = parts[-1].k_rows if parts else None
        if isinstance(last, slice) and last.stop == k_rows.start and size <= SLACK * smallest:
            before = parts.pop()
            assert isinstance(before.q_rows, slice)
            q_rows, k_rows = slice(before.q_rows.start, q_rows.stop), slice(last.start, k_rows.stop)
        else:
            smallest = size
        parts.append(Part(q_rows, k_rows=k_rows, k_tokens=slice(0, size), key=1))
    return parts


def attend(q: Tensor, k: Tensor, v: Tensor, read: Read | None, parts: list[Part]) -> Tensor:
    """Attend by one softmax to tokens (`key` 0 of the parts) and what `readable` made of centroids (1)."""
    queries, keys, values = _widened(q, k, v, read)
    return joined_attention([queries], keys, values, parts, 1.0)[0][..., : q.shape[-1]]


def _widened(q: Tensor, k: Tensor, v: Tensor, read: Read | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Give queries, keys and values the further features that `readable` has, if there is anything to
    read."""
    if read is None:
        return q, [k], [v]
    more = read[0].shape[-1] - q.shape[-1]
    q = F.pad(torch.cat((q, q.new_ones(*q.shape[:-1], 2)), -1), (0, more - 2))
    return q, [F.pad(k, (0, more)), read[0]], [F.pad(v, (0, more)), read[1]]


def readable(centroids: Centroids, dtype: torch.dtype) -> Read:
    """Make keys and values `[R, N, H, D + more]` of centroids; queries have 1 as first two further features.

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
