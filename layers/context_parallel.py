"""Context parallelism: one sequence over several ranks, each with an equal, contiguous shard of its tokens.

Between mixers a rank works on its own shard. Inside a mixer the ranks exchange what they must through the
operations of `SequenceShard`, which are differentiable: the backward pass sends the gradients back.

All ranks of a group must call the same operations in the same order, and each must keep every result in its
graph, also one it has no use for (see `halo`): without it that rank's backward pass leaves an exchange out,
and the others wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .errors import LayerError
from .parameters import always_used


class Segments(NamedTuple):
    """The segments of documents in one rank's shard of a packed row."""

    lengths: tuple[int, ...]
    """Of the segments, in tokens."""
    carried: int
    """Tokens of the first segment's document that stand on earlier ranks; 0: it begins here."""


@dataclass(frozen=True)
class SequenceShard:
    """This rank's shard of one call's row, and how the ranks exchange tensors. Made anew for each call."""

    group: Any
    """The torch.distributed group of the ranks that share the sequence; None: all ranks."""
    rank: int
    """This rank's place in the group: it holds shard `rank`."""
    size: int
    tokens: int
    """Tokens of the whole row; a multiple of `size`."""
    row_lengths: tuple[int, ...] = ()
    """Lengths of the documents packed in the whole row; empty for equal rows."""
    sent: Counter[str] = field(default_factory=Counter, compare=False, repr=False)
    """Operation -> bytes this rank has sent to others by it, forward and backward."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise LayerError(f"rank {self.rank} of a group of {self.size} that share a sequence")
        if self.tokens < 1 or self.tokens % self.size:
            raise LayerError(
                f"{self.tokens} tokens do not divide over {self.size} ranks: {self.tokens} / {self.size} = "
                f"{self.tokens / self.size:.4g}"
            )
        if self.row_lengths and (sum(self.row_lengths) != self.tokens or min(self.row_lengths) < 1):
            raise LayerError(f"documents of {self.row_lengths} tokens in a row of {self.tokens}")

    # Who holds what

    @property
    def length(self) -> int:
        """Tokens of a shard."""
        return self.tokens // self.size

    @property
    def start(self) -> int:
        """Place in the row of this rank's first token."""
        return self.rank * self.length

    @property
    def span(self) -> slice:
        """This rank's tokens of the row."""
        return slice(self.start, self.start + self.length)

    @cached_property
    def segments(self) -> tuple[Segments, ...]:
        """Segments of every rank; for equal rows the shard is one segment of a document that begins on rank
        0."""
        borders = (0, *accumulate(self.row_lengths)) if self.row_lengths else (0, self.tokens)
        found = []
        for first in range(0, self.tokens, self.length):
            inside = [border for border in borders if first < border < first + self.length]
            ends = [first, *inside, first + self.length]
            lengths = tuple(end - begin for begin, end in pairwise(ends))
            found.append(Segments(lengths, first - max(border for border in borders if border <= first)))
        return tuple(found)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of this rank's segments; empty for equal rows."""
        return self.segments[self.rank].lengths if self.row_lengths else ()

    @property
    def carried(self) -> int:
        """Tokens of this rank's first document that stand on earlier ranks."""
        return self.segments[self.rank].carried

    @property
    def continues(self) -> bool:
        """Whether this rank's first segment goes on with the previous rank's last document."""
        return self.carried > 0

    def own_heads(self, heads: int) -> slice:
        """Give the range of heads this rank has after `to_heads`, of `heads` in all."""
        first = self.rank * heads // self.size
        return slice(first, first + heads_per_rank(heads, self.size))

    # Exchanges

    def gather(self, x: Tensor) -> Tensor:
        """Gather every rank's `x`, which has one shape on all, as `[S, ...]` in rank order.

        The gradient of `x` is the sum of what all ranks give their copies of it.
        """
        counts = dict.fromkeys(range(self.size), x.numel())
        flat = x.expand(self.size, *x.shape).flatten()
        return self._exchange("gather", flat, counts, counts).view(self.size, *x.shape)

    def earlier(self, x: Tensor) -> Tensor:
        """Gather `x` (one shape on all ranks) of every rank before this one, `[rank, ...]` in rank order.

        The gradient of `x` is the sum of what all later ranks give their copies of it.
        """
        earlier, later = range(self.rank), range(self.rank + 1, self.size)
        sends, receives = (dict.fromkeys(ranks, x.numel()) for ranks in (later, earlier))
        y = self._exchange("earlier", x.expand(len(later), *x.shape).flatten(), sends, receives)
        return y.view(self.rank, *x.shape)

    def previous(self, x: Tensor) -> Tensor:
        """Get `x` (one shape on all ranks) of the previous rank; zeros on the first rank."""
        last, count = self.rank + 1 == self.size, x.numel()
        sends = {} if last else {self.rank + 1: count}
        receives = {self.rank - 1: count} if self.rank else {}
        y = self._exchange("previous", x.flatten()[: 0 if last else count], sends, receives)
        if self.rank == 0:
            y = torch.cat((y, y.new_zeros(count)))
        return y.view(x.shape)

    def hand_on(self, step: int, x: Tensor, count: int) -> Tensor:
        """Send from rank `step` to the next; all ranks take part in all steps, from 0 to S - 2.

        Args:
            x: on rank `step` at most `count` numbers, which zeros follow; on others nothing.

        Returns:
            On the next rank the `count` numbers, on others none. To be given to the next step, or what that
            gets depends on: so the backward pass takes the steps in reverse.
        """
        sends, receives = {}, {}
        if self.rank == step:
            sends = {step + 1: count}
            x = torch.cat((x, x.new_zeros(count - x.numel())))
        if self.rank == step + 1:
            receives = {step: count}
        return self._exchange("hand_on", x, sends, receives)

    def halo(self, *shards: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Exchange what looking one token back needs.

        Args:
            shards: `[B, T / S, C]` each, with its own C, of one dtype; their last vectors travel together.

        Returns:
            The shards to go on with, and the vector before each one's first, `[B, C]`: the previous rank's
            last, or None where a sequence begins with this rank's shard.
        """
        last = self.previous(torch.cat([x[:, -1] for x in shards], -1))
        if not self.continues:
            return [always_used(shards[0], last), *shards[1:]], [None] * len(shards)
        return list(shards), list(last.split([x.shape[-1] for x in shards], -1))

    def to_heads(self, *shards: Tensor) -> list[Tensor]:
        """Trade all heads of this rank's tokens for all tokens of its share of heads.

        Args:
            shards: `[B, T / S, heads, size]`, each with its own heads and size, of one dtype; they travel
                together. Fewer heads than ranks are replicated, if they divide the ranks, and their gradients
                summed.

        Returns:
            `[B, T, share, size]` each, of the heads `own_heads(heads)`.
        """
        batch = shards[0].shape[0]
        parts = []
        for x in shards:
            heads = x.shape[2]
            if heads_per_rank(heads, self.size) * self.size > heads:
                x = x.repeat_interleave(self.size // heads, 2)
            part = x.unflatten(2, (self.size, -1)).movedim(2, 0).flatten(3)
            parts.append(F.pad(part, (0, padded(part.shape[3]) - part.shape[3])))
        widths = [part.shape[3] for part in parts]
        packed = torch.cat(parts, -1).flatten()  # [S, B, T / S, widths]
        counts = dict.fromkeys(range(self.size), packed.numel() // self.size)
        y = self._exchange("to_heads", packed, counts, counts)
        y = y.view(self.size, batch, self.length, sum(widths)).movedim(0, 1).flatten(1, 2)
        received = zip(y.split(widths, -1), shards, strict=True)
        return [
            part[..., : heads_per_rank(x.shape[2], self.size) * x.shape[3]].unflatten(-1, (-1, x.shape[3]))
            for part, x in received
        ]

    def to_tokens(self, y: Tensor) -> Tensor:
        """Trade `[B, T, H / S, D]` back for `[B, T / S, H, D]`: all heads of this rank's tokens."""
        batch, _, share, size = y.shape
        packed = y.unflatten(1, (self.size, self.length)).movedim(1, 0).flatten()
        counts = dict.fromkeys(range(self.size), packed.numel() // self.size)
        x = self._exchange("to_tokens", packed, counts, counts)
        return x.view(self.size, batch, self.length, share, size).movedim(0, 2).flatten(2, 3)

    def _exchange(self, name: str, x: Tensor, sends: dict[int, int], receives: dict[int, int]) -> Tensor:
        """Exchange `x`, which is flat: its first `sends[r]` numbers go to the first rank r that is in `sends`
        and so on; the result has `receives[r]` numbers from rank r."""
        counts = ([each.get(rank, 0) for rank in range(self.size)] for each in (sends, receives))
        return _Exchange.apply(x, self, name, *counts)

    def _all_to_all(self, name: str, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        y = x.new_empty(sum(receives))
        width = x.element_size()  # as bytes, which every backend can send
        dist.all_to_all_single(
            y.view(torch.uint8),
            x.contiguous().view(torch.uint8),
            [count * width for count in receives],
            [count * width for count in sends],
            group=self.group,
        )
        self.sent[name] += (sum(sends) - sends[self.rank]) * width
        return y


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: SequenceShard, name: str, sends: Sequence[int], receives: Sequence[int]
    ) -> Tensor:
        ctx.call = shard, name, sends, receives
        return shard._all_to_all(name, x, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        shard, name, sends, receives = ctx.call
        return shard._all_to_all(name, grad, receives, sends), None, None, None, None


def padded(numbers: int) -> int:
    """Count the places that `to_heads` takes for a token's numbers: whole vectors of 16 bytes, so that
    kernels for CUDA can load what comes out where it lies."""
    return -(-numbers // 8) * 8


def heads_per_rank(heads: int, size: int) -> int:
    """Divide `heads` among `size` ranks; raise LayerError where they cannot be shared out."""
    if heads % size and size % heads:
        raise LayerError(f"{heads} heads cannot be shared out over {size} ranks: neither divides the other")
    return max(1, heads // size)
