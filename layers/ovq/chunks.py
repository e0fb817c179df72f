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

from ..norms import compute_dtype
from ..softmax import Mask, Part, joined_attention
from ..softmax.grid import ChunkGrid, rows
from ..softmax.joined import Gradient, Joint, Rows, part_gradients
from ..softmax.kernels import choose as choose_kernel
from .dictionary import Call, Centroids, Step, choose, running_means

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
    call: Call, grid: ChunkGrid, lengths: Sequence[int], qkv: tuple[Tensor, ...], base: Centroids | None
) -> tuple[Tensor, list[Tensor], Centroids]:
    """Compute all chunks of sequences of `lengths` tokens, the longest first, that lie in `grid`.

    Args:
        qkv: queries, keys and values by token, `[B, T, H, D]`.
        base: the dictionary before the first chunk; None where nothing has entered yet.

    Returns:
        Heads by token, for each sequence the centroids `[H, A]` of the tokens that entered, and the
        dictionary after the last step.
    """
    first = grid.spans[0].first
    whole = ChunkRows.of(call, lengths, first)
    places = [grid.spans[s].query(c) for c, n in enumerate(whole.active, first) for s in range(n)]
    order, entering = rows(places, qkv[0].device), whole.entering()
    q, k, v = (_select(grid.queries(x), order) for x in qkv)
    tokens = entering_tokens(*((k, v) if len(entering) == len(k) else (k[entering], v[entering])))
    slot = choose(call, tokens[..., : k.shape[-1]], whole.steps, base)
    groups = _groups(call, whole, first, tokens)
    # By `split`, whose backward joins once; that of a slice fills a whole tensor for each.
    sizes = [sum(whole.active[group]) for group in groups]
    entries = [sum(step.sequences for step in whole.steps[group]) for group in groups]
    pieces = [*(x.split(sizes) for x in (q, k, v)), *(x.split(entries) for x in (tokens, slot))]
    outs = []
    for group, operands in zip(groups, zip(*pieces, strict=True), strict=True):
        out, *after = _Group.apply(
            call, whole.part(group), first + group.start, *operands, *(base or (None, None))
        )
        base = Centroids(*after)
        outs.append(out)
    assert base is not None
    y = torch.cat(outs) if len(outs) > 1 else outs[0]
    y = y if isinstance(order, slice) else _select(y, order.argsort())
    slots = [slot[whole.entered(s)].transpose(0, 1).flatten(1) for s in range(len(lengths))]
    return grid.tokens_of(y), slots, base


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
    """One group of chunks, from chunk number `first` on. Its backward makes the centroids again, but not the
    attention."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, own: ChunkRows, first: int, *given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give heads like q, and the dictionary after the last step.

        `given`: q, k, v, entering tokens and their centroids; the means and counts before the first step.
        """
        q, k, v, tokens, slot, means, counts = given
        base = None if means is None else Centroids(means, counts)
        reads, parts, last = _dictionary(call, own, first, tokens, slot, base, q.dtype)
        queries, keys, values = _widened(q, k, v, reads)
        joint, kernel = Joint(queries), choose_kernel(queries)
        joint.add(kernel, [queries], keys, values, [Part(mask=Mask.LOWER), *parts], 1.0)
        y, lse = joint.result()
        y = y[..., : q.shape[-1]].contiguous()
        ctx.save_for_backward(*given, y, lse)
        ctx.plan = call, own, first, kernel
        after = [x.clone() for x in last]
        ctx.mark_non_differentiable(after[1])
        return y, after[0], after[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_means: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        call, own, first, kernel = ctx.plan
        q, k, v, tokens, slot, means, counts, y, lse = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in (tokens, means) if x is not None]
        base = None if means is None else Centroids(leaves[1], counts)
        with torch.autocast(q.device.type, enabled=False):
            with torch.enable_grad():
                reads, parts, last = _dictionary(call, own, first, leaves[0], slot, base, q.dtype)
            seen = [(keys.detach(), values.detach()) for keys, values in reads]
            queries, all_keys, all_values = _widened(q, k, v, seen)
            more = (0, queries.shape[-1] - q.shape[-1])
            joint = F.pad(grad, more), F.pad(y, more), lse
            d_q = Gradient(queries)
            d_keys, d_values = [Gradient(x) for x in all_keys], [Gradient(x) for x in all_values]
            operands, parts = ([queries], all_keys, all_values), [Part(mask=Mask.LOWER), *parts]
            part_gradients(kernel, joint, *operands, parts, 1.0, ([d_q], d_keys, d_values))
            d_qkv = (x.result()[..., : q.shape[-1]] for x in (d_q, d_keys[0], d_values[0]))
            made = [*(x for read in reads for x in read), last.means]
            grads = [x.result() for pair in zip(d_keys[1:], d_values[1:], strict=True) for x in pair]
            found = torch.autograd.grad(made, leaves, [*grads, grad_means], allow_unused=True)
        d_tokens, d_means = (*found, None)[:2]
        return None, None, None, *d_qkv, d_tokens, None, d_means, None


def _dictionary(
    call: Call,
    own: ChunkRows,
    first: int,
    tokens: Tensor,
    slot: Tensor,
    base: Centroids | None,
    dtype: torch.dtype,
) -> tuple[list[Read], list[Part], Centroids]:
    """Make what a group's chunks read beside themselves, who reads it, and the dictionary after the last
    step."""
    reads: list[Read] = []
    parts: list[Part] = []
    if base is not None and call.size(first):
        count = own.active[0]
        reads.append(readable(base.rows(slice(0, count)).first(call.size(first)), dtype))
        parts.append(Part(slice(0, count), k_rows=slice(0, count), key=1))
    if not own.steps:
        assert base is not None
        return reads, parts, base
    after = running_means(tokens, slot, own.steps, base)
    if len(own.active) > 1 and call.size(first + len(own.active) - 1):
        parts += _dictionary_parts(own, key=len(reads) + 1)
        reads.append(readable(after, dtype))
    return reads, parts, after.rows(slice(len(slot) - own.steps[-1].sequences, None))


def _dictionary_parts(own: ChunkRows, key: int) -> list[Part]:
    """Show every chunk but the first the centroids after the chunk before it; successive ones with nearly as
    many centroids are one part, the smaller ones' missing centroids being hidden."""
    parts: list[Part] = []
    row = smallest = 0
    for chunk, step in enumerate(own.steps[: len(own.active) - 1], 1):
        size, count, start = step.after, own.active[chunk], own.start(chunk)
        q_rows, k_rows = slice(start, start + count), slice(row, row + count)
        row += step.sequences
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
    """Attend by one softmax to tokens (`key` 0 of the parts) and what `readable` made of centroids (1,
    ...)."""
    queries, keys, values = _widened(q, k, v, reads)
    return joined_attention([queries], keys, values, parts, 1.0)[0][..., : q.shape[-1]]


def _widened(
    q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Read]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Give queries, keys and values the further features that `readable` has, if there are any."""
    if not reads:
        return q, [k], [v]
    more = reads[0][0].shape[-1] - q.shape[-1]
    ones = q.new_ones(*q.shape[:-1], 2)
    q = F.pad(torch.cat((q, ones), -1), (0, more - 2))
    keys, values = zip((F.pad(k, (0, more)), F.pad(v, (0, more))), *reads, strict=True)
    return q, list(keys), list(values)


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
