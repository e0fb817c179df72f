"""OVQ attention as a function: exact keys within a chunk, everything older in a growing dictionary of means.

Shapes: B sequences, T tokens, H heads, D head size, L tokens of a chunk, M most centroids. Slots are the
centroids of the tokens in the chunks that a call completed, `[B, H, A]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import full_precision
from ..buffers import GrowingBuffer
from ..errors import LayerError
from ..norms import compute_dtype
from ..softmax import Mask, Part, attention
from ..softmax.attention import same_dtype
from ..softmax.grid import ChunkGrid
from ..state import MixerState
from .chunks import attend, entering_tokens, on_grid, readable
from .dictionary import Call, Centroids, Routes, advance

__all__ = ["OVQState", "Routes", "ovq_attention"]


@dataclass(kw_only=True)
class OVQState(MixerState):
    """State of OVQ: the dictionary after all whole chunks, and the tokens of the unfinished one.

    Centroids that do not exist yet have count 0 (but before there is any, centroid 0 may have gathered some).
    """

    centroid_k: Tensor  # [B, H, M, D], means of normalised keys, in fp32 or wider
    centroid_v: Tensor  # [B, H, M, D]
    counts: Tensor  # [B, H, M, 1], in fp32 or wider
    pending_k: Tensor  # [B, P, H, D], normalised
    pending_v: Tensor  # [B, P, H, D]
    _rows: list[GrowingBuffer] | None = field(default=None, init=False, repr=False, compare=False)
    _read: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def empty(cls, k: Tensor, max_centroids: int) -> Self:
        """Make the state before the first token, for keys like `k` `[B, *, H, D]`."""
        batch, _, heads, size = k.shape
        keys, values, counts = (
            k.new_zeros(batch, heads, max_centroids, width, dtype=compute_dtype(k))
            for width in (size, size, 1)
        )
        pending_k, pending_v = (k.new_zeros(batch, 0, heads, size) for _ in range(2))
        return cls(
            centroid_k=keys, centroid_v=values, counts=counts, pending_k=pending_k, pending_v=pending_v
        )

    def centroids(self) -> Centroids:
        return Centroids(torch.cat((self.centroid_k, self.centroid_v), -1), self.counts)

    def set_centroids(self, centroids: Centroids) -> None:
        missing = self.counts.shape[2] - centroids.counts.shape[2]
        means, self.counts = (F.pad(x, (0, 0, 0, missing)) for x in centroids)
        self.centroid_k, self.centroid_v = means.chunk(2, -1)
        self._read = None

    def readable(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Prepare the first `size` centroids for `attend`; without gradients kept until the dictionary
        changes."""
        if torch.is_grad_enabled():
            return readable(self.centroids().first(size), dtype)
        if self._read is None or self._read[0].dtype != dtype:
            self._read = readable(self.centroids().first(size), dtype)
        return self._read

    def pend(self, k: Tensor, v: Tensor) -> None:
        """Append tokens `[B, T, H, D]`; without gradients into buffers."""
        self.position += k.shape[1]
        if torch.is_grad_enabled():
            self.pending_k, self.pending_v = (
                torch.cat((self.pending_k, k), 1),
                torch.cat((self.pending_v, v), 1),
            )
            self._rows = None
            return
        self._rows = self._rows or [GrowingBuffer(), GrowingBuffer()]
        self.pending_k = self._rows[0].append(self.pending_k, k)
        self.pending_v = self._rows[1].append(self.pending_v, v)

    def drop_pending(self) -> None:
        self.pending_k, self.pending_v = self.pending_k[:, :0], self.pending_v[:, :0]
        if self._rows is not None:
            self.pending_k, self.pending_v = (rows.keep_last(0) for rows in self._rows)

    def take(self) -> Self:
        taken = super().take()
        taken._rows, taken._read = self._rows, self._read
        return taken


def ovq_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk: int,
    max_centroids: int,
    state: OVQState | None = None,
    lengths: Sequence[int] = (),
    routes: Routes | None = None,
) -> tuple[Tensor, OVQState | None, Routes]:
    """Attend to the tokens of the query's chunk up to itself, and to centroids of the chunks before.

    The logit of a token is `q . k`, that of a centroid of n tokens `q . k + log n`: no scale is applied.

    Args:
        q, k, v: `[B, T, H, D]`, keys of length 1 (OVQ paper; centroids are chosen by inner products).
        chunk: L.
        max_centroids: M.
        state: what an earlier call returned; it carries the position. Without gradients it is spent.
        lengths: documents packed in the row (B = 1); each starts at position 0, and no state comes out.
        routes: decisions to replay, for at least the chunks that this call completes.

    Returns:
        `y` `[B, T, H, D]` in q's dtype; the state to go on from (None for packed documents); the routes.

    Choice and means are in fp32 (float64 for float64 inputs), whatever the inputs' dtype.
    """
    if q.ndim != 4 or not q.shape == k.shape == v.shape:
        raise LayerError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if lengths and (state is not None or q.shape[0] != 1 or sum(lengths) != q.shape[1]):
        raise LayerError(f"documents of {tuple(lengths)} tokens in a row of shape {tuple(q.shape[:2])}")
    q, k, v = same_dtype(q, k, v)
    call = Call(chunk, max_centroids, routes, [(row, 0) for row in range(len(k))])
    with torch.autocast(q.device.type, enabled=False), full_precision(q):
        if lengths:
            y, slot = _packed(call, q, k, v, lengths)
            return y, None, Routes(slot.int())
        state = OVQState.empty(k, max_centroids) if state is None else _taken(state, k)
        first = state.position // chunk * chunk
        y, slot = _sequences(call, q, k, v, state)
    return y, state, Routes(slot.int(), first)


def _taken(state: OVQState, k: Tensor) -> OVQState:
    """Take a state whose fields a call with keys like `k` may replace, with pending tokens in their dtype."""
    own = replace(state) if torch.is_grad_enabled() else state.take()
    if own.pending_k.dtype != k.dtype:
        own.pending_k, own.pending_v, own._rows = own.pending_k.to(k.dtype), own.pending_v.to(k.dtype), None
    return own


def _sequences(call: Call, q: Tensor, k: Tensor, v: Tensor, state: OVQState) -> tuple[Tensor, Tensor]:
    """Compute heads and slots; bring `state` up to date."""
    room = call.chunk - state.position % call.chunk
    tokens = k.shape[1]
    if tokens <= room:
        return _within_chunk(call, q, k, v, state)
    if room == call.chunk:
        return _whole_chunks(call, q, k, v, state)
    (q, q_rest), (k, k_rest), (v, v_rest) = (x.split([room, tokens - room], 1) for x in (q, k, v))
    head, slot = _within_chunk(call, q, k, v, state)
    rest, more = _sequences(call, q_rest, k_rest, v_rest, state)
    return torch.cat((head, rest), 1), torch.cat((slot, more), 2)


def _within_chunk(call: Call, q: Tensor, k: Tensor, v: Tensor, state: OVQState) -> tuple[Tensor, Tensor]:
    """Compute a call whose tokens all lie in one chunk, such as a token to decode: nothing is padded."""
    number, held = divmod(state.position, call.chunk)
    size, tokens = call.size(number), k.shape[1]
    state.pend(k, v)
    keys, values = state.pending_k, state.pending_v
    parts = [Part(k_tokens=slice(0, held))] if held else []
    parts.append(Part(k_tokens=slice(held, None), mask=Mask.LOWER))
    if tokens == 1:
        parts = [Part()]
    read = state.readable(size, k.dtype) if size else None
    if read is not None:
        parts.append(Part(key=1))
    y = attend(q, keys, values, read, parts)
    if held + tokens < call.chunk:
        return y, _nothing(k)
    step, added = call.step(number, len(k)), entering_tokens(keys, values)
    after, slot = advance(call, [step], added, state.centroids())
    state.set_centroids(after.rows(slice(len(k), None)))
    state.drop_pending()
    return y, slot


def _nothing(k: Tensor) -> Tensor:
    """Make the slots of no token."""
    return torch.empty(k.shape[0], k.shape[2], 0, dtype=torch.int64, device=k.device)


def _whole_chunks(call: Call, q: Tensor, k: Tensor, v: Tensor, state: OVQState) -> tuple[Tensor, Tensor]:
    """Compute a call that starts with a chunk and has more tokens than that."""
    batch, tokens = k.shape[:2]
    grid = ChunkGrid.equal(batch, tokens, call.chunk, state.position)
    y, slots, last = on_grid(call, grid, [tokens] * batch, (q, k, v), state.centroids())
    state.set_centroids(last)
    state.drop_pending()
    complete = tokens // call.chunk * call.chunk
    state.position += complete
    state.pend(k[:, complete:], v[:, complete:])
    return y, torch.stack(slots)


def _packed(call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Compute documents: those of a chunk and more share a grid, the others are plain causal attention."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    long = [i for i in order if lengths[i] >= call.chunk]
    y: list[Any] = [None] * len(lengths)
    slots = [_nothing(k)] * len(lengths)
    pieces = [x.split(list(lengths), 1) for x in (q, k, v)]
    for i in order[len(long) :]:
        y[i], _ = attention(*(x[i] for x in pieces), scale=1.0)
    if long:
        own = [lengths[i] for i in long]
        grid = ChunkGrid.packed([sum(lengths[:i]) for i in long], own, call.chunk, k.device)
        entered = [n // call.chunk * call.chunk for n in lengths]
        call = replace(call, places=[(0, sum(entered[:i])) for i in long])
        empty = OVQState.empty(k, 1).centroids()
        base = Centroids(*(x.expand(len(long), -1, -1, -1) for x in empty))
        out, found, _ = on_grid(call, grid, own, (q, k, v), base)
        for i, piece, slot in zip(long, out.split(own, 1), found, strict=True):
            y[i], slots[i] = piece, slot[None]
    return torch.cat(y, 1), torch.cat(slots, 2)
