"""Softmax attention mixers without a compressed state: full, sliding window, block window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Flops
from .buffers import GrowingBuffer
from .context import Context
from .context_parallel import SequenceShard
from .errors import is_count, require, require_counts
from .heads import ProjectionOptions
from .parameters import always_used
from .projections import Projected, ProjectedMixer, ProjectedState
from .registry import register
from .softmax import attention, block_window_attention


@dataclass
class AttentionState(ProjectedState):
    """State of an attention mixer: keys and values that later queries may still see, in time order."""

    k: Tensor | None = None  # [B, L, G, D], normalised and rotated; None at the start
    v: Tensor | None = None
    sink_k: Tensor | None = None  # [B, sinks, G, D]: the first tokens', once the window has left them
    sink_v: Tensor | None = None
    _buffers: list[GrowingBuffer] | None = field(default=None, init=False, repr=False, compare=False)

    def take(self) -> Self:
        taken = super().take()
        taken._buffers = self._buffers  # any other copy does without: its tensors do not lie in the buffers
        return taken


class AttentionMixer(ProjectedMixer):
    """Base of the three kinds: keeps a cache of the keys still to be seen, and counts by visible keys."""

    def core(
        self, heads: Projected, context: Context, state: AttentionState | None
    ) -> tuple[Tensor, AttentionState | None]:
        halo = self.halo(context)
        if halo is not None:
            assert context.shard is not None
            return self._attend_with_halo(heads, halo, context.shard), None
        state = state or AttentionState()
        k, v, buffers = self._append(state, heads.k, heads.v)
        y = self.attend(heads.q, k, v, state, context.row_lengths)
        if not context.want_state:
            return y, None
        position = state.position + heads.q.shape[1]
        sinks = self._sinks(k, v, state, position)
        count = self.keys_kept(position)
        k, v = (_keep_last(t, count, own) for t, own in zip((k, v), buffers or (None, None), strict=True))
        after = AttentionState(position, *heads.shift, k, v, *sinks)
        after._buffers = buffers
        return y, after

    def _append(
        self, state: AttentionState, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, list[GrowingBuffer] | None]:
        """Cached and new keys and values, and the buffers they lie in (without gradients only)."""
        if state.k is None or state.v is None:
            return k, v, None
        if torch.is_grad_enabled() or k.shape[1] > self.longest_append():
            return torch.cat((state.k, k), 1), torch.cat((state.v, v), 1), None
        buffers = state._buffers or [GrowingBuffer(), GrowingBuffer()]
        return buffers[0].append(state.k, k), buffers[1].append(state.v, v), buffers

    def _sinks(
        self, k: Tensor, v: Tensor, state: AttentionState, position: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Take the sink fields of the state at `position` from keys and values that still start at token
        0."""
        return None, None

    def _attend_with_halo(self, heads: Projected, halo: int, shard: SequenceShard) -> Tensor:
        """Attend in a shard whose first document may go on from the rank before, which gives its last
        keys."""
        first, *rest = shard.lengths or (shard.length,)
        q, both = heads.q, torch.stack((heads.k, heads.v))
        before = shard.previous(both[:, :, shard.length - halo :]) if halo else both[:, :, :0]
        sinks = self._earlier_sinks(both, shard)
        q = always_used(q, before, sinks)
        state = AttentionState(shard.carried)
        if self.sinks_kept(shard.carried):
            state.sink_k, state.sink_v = sinks
        before = before[:, :, halo - self.keys_kept(shard.carried) :]
        k, v = torch.cat((before, both[:, :, :first]), 2)
        y = self.attend(q[:, :first], k, v, state, ())
        if not rest:
            return y
        k, v = both[:, :, first:]
        return torch.cat((y, self.attend(q[:, first:], k, v, AttentionState(), rest)), 1)

    def _earlier_sinks(self, both: Tensor, shard: SequenceShard) -> Tensor:
        """Fetch keys and values `[2, B, sinks, G, D]` of the sinks of this rank's first document that earlier
        ranks hold, zeros for others. `both`: this rank's own keys and values."""
        sinks = self.sinks_before(self.options)
        if not sinks:
            return both[:, :, :0]
        pieces = shard.lengths or (shard.length,)
        begin = shard.carried if len(pieces) == 1 else 0  # of the last piece in its document
        own = both[:, :, shard.length - pieces[-1] :][:, :, : max(0, sinks - begin)]
        beside = min(begin, sinks), max(0, sinks - begin - pieces[-1])
        given = shard.earlier(F.pad(own, (0, 0, 0, 0, *beside)))  # each at its place in the document
        return given[(shard.start - shard.carried) // shard.length :].sum(0)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, lengths: Sequence[int]
    ) -> Tensor:
        """Compute heads `[B, T, H, D]` for queries that are the last T of the keys `[B, L, G, D]`; of
        documents of `lengths` packed in a row, without a state."""
        raise NotImplementedError

    def window_start(self, position: int) -> int:
        """Find the first token that the query at `position` sees, sinks aside."""
        raise NotImplementedError

    def keys_kept(self, position: int) -> int:
        """Count which of the last of `position` tokens the window of a token at `position` or later still
        holds."""
        return position - self.window_start(position)

    def sinks_kept(self, position: int) -> int:
        """Count the first tokens that are kept beside the window."""
        return 0

    def visible(self, position: int) -> int:
        """Count the keys that the query at `position` sees, itself included."""
        return position + 1 - self.window_start(position) + self.sinks_kept(position)

    def visible_sum(self, tokens: int) -> int:
        """Sum up visible keys over the queries of one sequence."""
        raise NotImplementedError

    def longest_append(self) -> float:
        """Give the most new tokens that are appended to the cache's buffer in place: as many as a query
        sees."""
        before = self.keys_before(self.options)
        return float("inf") if before is None else before + 1

    def empty_state(self, batch: int) -> AttentionState:
        empty = self.c_k.weight.new_empty(batch, 0, self.num_kv_heads, self.head_dim)
        return AttentionState(k=empty, v=empty.clone())

    def flops_at(self, position: int) -> Flops:
        return self.projection_flops() + self._pair_flops(self.visible(position))

    def flops_per_token(self, context_length: int) -> Flops:
        return self.projection_flops() + self._pair_flops(self.visible_sum(context_length) / context_length)

    def _pair_flops(self, pairs: float) -> Flops:
        return Flops(4.0 * self.num_heads * self.head_dim * pairs)

    def state_bytes(self, context_length: int, element_size: int = 4) -> int:
        keys = self.keys_kept(context_length) + self.sinks_kept(context_length)
        return 2 * keys * self.kv_width * element_size + self.shift_bytes(context_length, element_size)


def _keep_last(rows: Tensor, count: int, buffer: GrowingBuffer | None) -> Tensor:
    """The last `count` rows of `[B, L, ...]`, not keeping the memory of the others."""
    if buffer is not None:
        return buffer.keep_last(count)
    return rows if count == rows.shape[1] else rows[:, rows.shape[1] - count :].clone()


@register("full")
class FullAttention(AttentionMixer):
    """Causal attention to all earlier tokens."""

    Options = ProjectionOptions

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, lengths: Sequence[int]
    ) -> Tensor:
        return attention(q, k, v, causal=True, lengths=lengths)[0]

    def window_start(self, position: int) -> int:
        return 0

    def visible_sum(self, tokens: int) -> int:
        return tokens * (tokens + 1) // 2


@dataclass
class SlidingOptions(ProjectionOptions):
    """Options of the sliding window, which moves by single tokens."""

    window: int = 256
    """Keys that a query sees, itself included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, "window")


@register("sliding_window")
class SlidingWindow(AttentionMixer):
    """Causal attention to the last `window` tokens."""

    Options = SlidingOptions

    @classmethod
    def default_rotary_dim(cls, head_dim: int) -> int:
        """Rotate the whole head, as in the paper's sliding-window layers."""
        return head_dim // 2 * 2

    @classmethod
    def keys_before(cls, options: SlidingOptions) -> int:
        return options.window - 1

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, lengths: Sequence[int]
    ) -> Tensor:
        return attention(q, k, v, causal=True, window=self.options.window, lengths=lengths)[0]

    def window_start(self, position: int) -> int:
        return max(0, position + 1 - self.options.window)

    def visible_sum(self, tokens: int) -> int:
        short = min(tokens, self.options.window)
        return short * (short + 1) // 2 + (tokens - short) * self.options.window


@dataclass
class BlockOptions(ProjectionOptions):
    """Options of the block window: whole chunks, and sinks."""

    chunk: int = 256
    """Chunks start at multiples of this many tokens."""
    window_chunks: int = 3
    """Chunks that a query sees, the one it stands in (up to itself) included."""
    sinks: int = 0
    """The first tokens of the sequence, always visible; at most one chunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_counts(self, "chunk", "window_chunks")
        allowed = f"a whole number from 0 to chunk ({self.chunk})"
        require(is_count(self.sinks, 0) and self.sinks <= self.chunk, "sinks", self.sinks, allowed)


@register("block_window")
class BlockWindow(AttentionMixer):
    """Causal attention to the query's chunk and the ones before it, and to the first tokens (sinks)."""

    Options = BlockOptions

    @classmethod
    def keys_before(cls, options: BlockOptions) -> int:
        return options.window_chunks * options.chunk - 1  # a document may begin anywhere in a rank's chunk

    @classmethod
    def sinks_before(cls, options: BlockOptions) -> int:
        return options.sinks

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, lengths: Sequence[int]
    ) -> Tensor:
        options = self.options
        y, _ = block_window_attention(
            q,
            k,
            v,
            chunk=options.chunk,
            window_chunks=options.window_chunks,
            sinks=options.sinks,
            position=state.position,
            sink_k=state.sink_k,
            sink_v=state.sink_v,
            lengths=lengths,
        )
        return y

    def window_start(self, position: int) -> int:
        chunk = self.options.chunk
        return max(0, (position // chunk + 1 - self.options.window_chunks) * chunk)

    def _sinks(
        self, k: Tensor, v: Tensor, state: AttentionState, position: int
    ) -> tuple[Tensor | None, Tensor | None]:
        count = self.sinks_kept(position)
        if state.sink_k is not None or count == 0:
            return state.sink_k, state.sink_v
        return k[:, :count].clone(), v[:, :count].clone()

    def sinks_kept(self, position: int) -> int:
        return self.options.sinks if self.window_start(position) else 0

    def visible_sum(self, tokens: int) -> int:
        chunk, total = self.options.chunk, 0
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            total += count * (self.visible(start) - 1) + count * (count + 1) // 2
        return total
