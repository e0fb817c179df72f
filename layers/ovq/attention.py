"""OVQ attention as a function: exact keys within a chunk, everything older in a growing dictionary of means.

Shapes: B sequences, T tokens, H heads, D head size, L tokens of a chunk, M most centroids. Slots are the
centroids of the tokens in the chunks that a call completed, `[B, H, A]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base import MixerState
from ..buffers import GrowingBuffer
from ..errors import LayerError
from ..norms import compute_dtype
from ..softmax import Mask, Part, attention
from ..softmax.attention import same_dtype
from .chunks import Call, Grid, Routes, attend, choose, chunks, entering_tokens, readable
from .dictionary import Centroids, Step, running_means

__all__ = ["OVQState", "Routes", "ovq_attention"]


@dataclass
class OVQState(MixerState):
    """The dictionary after all whole chunks, and the tokens of the unfinished one.

    Centroids that do not exist yet have count 0 (but before there is any, centroid 0 may have gathered some).
    """

    centroid_k: Tensor | None = None  # [B, H, M, D], means of normalised keys, in fp32 or wider
    centroid_v: Tensor | None = None  # [B, H, M, D]
    counts: Tensor | None = None  # [B, H, M, 1], in fp32 or wider
    pending_k: Tensor | None = None  # [B, P, H, D], normalised
    pending_v: Tensor | None = None  # [B, P, H, D]
    _rows: list[GrowingBuffer] | None = field(default=None, init=False, repr=False, compare=False)
    _read: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def empty(cls, k: Tensor, max_centroids: int) -> Self:
        """Before the first token, for keys like `k` `[B, *, H, D]`."""
        batch, _, heads, size = k.shape
        keys, values, counts = (
            k.new_zeros(batch, heads, max_centroids, width, dtype=compute_dtype(k))
            for width in (size, size, 1)
        )
        pending_k, pending_v = (k.new_zeros(batch, 0, heads, size) for _ in range(2))
        return cls(0, keys, values, counts, pending_k, pending_v)

    def centroids(self) -> Centroids:
        assert self.centroid_k is not None
        assert self.centroid_v is not None
        assert self.counts is not None
        return Centroids(torch.cat((self.centroid_k, self.centroid_v), -1), self.counts)

    def set_centroids(self, centroids: Centroids) -> None:
        assert self.counts is not None
        missing = self.counts.shape[2] - centroids.counts.shape[2]
        means, self.counts = (F.pad(x, (0, 0, 0, missing)) for x in centroids)
        self.centroid_k, self.centroid_v = means.chunk(2, -1)
        self._read = None

    def readable(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `size` centroids for `attend`; without gradients kept until the dictionary changes."""
        if torch.is_grad_enabled():
            return readable(self.centroids().first(size), dtype)
        if self._read is None or self._read[0].dtype != dtype:
            self._read = readable(self.centroids().first(size), dtype)
        return self._read

    def pend(self, k: Tensor, v: Tensor) -> None:
        """Append tokens `[B, T, H, D]`; without gradients into buffers."""
        assert self.pending_k is not None
        assert self.pending_v is not None
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
        assert self.pending_k is not None
        assert self.pending_v is not None
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
    """Attention to the tokens of the query's chunk up to itself, and to centroids of the chunks before.

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
    call = Call(chunk, max_centroids, routes)
    with torch.autocast(q.device.type, enabled=False):
        if lengths:
            y, slot = _packed(call, q, k, v, lengths)
            return y, None, Routes(slot.int())
        state = OVQState.empty(k, max_centroids) if state is None else _taken(state, k)
        first = state.position // chunk * chunk
        y, slot = _sequences(call, q, k, v, state)
    return y, state, Routes(slot.int(), first)


def _taken(state: OVQState, k: Tensor) -> OVQState:
    """A state whose fields a call with keys like `k` may replace, with pending tokens in their dtype."""
    own = replace(state) if torch.is_grad_enabled() else state.take()
    assert own.pending_k is not None
    assert own.pending_v is not None
    if own.pending_k.dtype != k.dtype:
        own.pending_k, own.pending_v, own._rows = own.pending_k.to(k.dtype), own.pending_v.to(k.dtype), None
    return own


def _sequences(call: Call, q: Tensor, k: Tensor, v: Tensor, state: OVQState) -> tuple[Tensor, Tensor]:
    """Heads and slots; brings `state` up to date."""
    room = call.chunk - state.position % call.chunk
    tokens = k.shape[1]
    if tokens <= room:
        return _within_chunk(call, q, k, v, state)
    if room == call.chunk:
        return _whole_chunks(call, q, k, v, state)
    cut = [room, tokens - room]
    (q, q_rest), (k, k_rest), (v, v_rest) = (x.split(cut, 1) for x in (q, k, v))
    head, slot = _within_chunk(call, q, k, v, state)
    rest, more = _sequences(call, q_rest, k_rest, v_rest, state)
    return torch.cat((head, rest), 1), torch.cat((slot, more), 2)


def _within_chunk(call: Call, q: Tensor, k: Tensor, v: Tensor, state: OVQState) -> tuple[Tensor, Tensor]:
    """A call whose tokens all lie in one chunk, such as a token to decode: nothing is padded."""
    number, held = divmod(state.position, call.chunk)
    size, tokens = call.size(number), k.shape[1]
    state.pend(k, v)
    keys, values = state.pending_k, state.pending_v
    assert keys is not None
    assert values is not None
    parts = [Part(k_tokens=slice(0, held))] if held else []
    parts.append(Part(k_tokens=slice(held, None), mask=Mask.LOWER))
    if tokens == 1:
        parts = [Part()]
    reads = []
    if size:
        reads.append(state.readable(size, k.dtype))
        parts.append(Part(key=1))
    y = attend(q, keys, values, reads, parts)
    if held + tokens < call.chunk:
        return y, _nothing(k)
    step = Step(len(k), size, call.size(number + 1))
    added, base = entering_tokens(keys, values), state.centroids()
    starts = [(b, number * call.chunk) for b in range(len(k))]
    slot = choose(call, added[..., : k.shape[-1]], [step], base, starts)
    state.set_centroids(running_means(added, slot, [step], base))
    state.drop_pending()
    return y, slot


def _nothing(k: Tensor) -> Tensor:
    """The slots of no token."""
    return torch.empty(k.shape[0], k.shape[2], 0, dtype=torch.int64, device=k.device)


def _whole_chunks(call: Call, q: Tensor, k: Tensor, v: Tensor, state: OVQState) -> tuple[Tensor, Tensor]:
    """A call that starts with a chunk and has more tokens than that."""
    batch, tokens = k.shape[:2]
    count, complete = -(-tokens // call.chunk), tokens // call.chunk
    missing = count * call.chunk - tokens

    def rows(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return x.unflatten(1, (count, call.chunk)).transpose(0, 1).flatten(0, 1)

    grid = Grid([batch] * count, [batch] * complete, state.position // call.chunk)
    starts = [(b, state.position) for b in range(batch)]
    y, slot, last = chunks(call, grid, rows(q), rows(k), rows(v), state.centroids(), starts)
    state.set_centroids(last)
    state.drop_pending()
    state.position += complete * call.chunk
    state.pend(k[:, complete * call.chunk :], v[:, complete * call.chunk :])
    y = y.unflatten(0, (count, batch)).transpose(0, 1).flatten(1, 2)[:, :tokens]
    return y, slot.unflatten(0, (complete, batch)).permute(1, 2, 0, 3).flatten(2)


def _packed(call: Call, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Documents of a chunk and more share a grid; the others are plain causal attention."""
    long = sorted((i for i, n in enumerate(lengths) if n >= call.chunk), key=lambda i: -lengths[i])
    pieces = [x.split(list(lengths), 1) for x in (q, k, v)]
    y = {i: attention(*(x[i] for x in pieces), scale=1.0)[0] for i in range(len(lengths)) if i not in long}
    slots = [_nothing(k)] * len(lengths)
    if long:
        own = [lengths[i] for i in long]
        grid = Grid(
            [sum(n > c * call.chunk for n in own) for c in range(-(-own[0] // call.chunk))],
            [sum(n >= c * call.chunk for n in own) for c in range(1, own[0] // call.chunk + 1)],
        )
        places = torch.cat([grid.places(s, n, call.chunk) for s, n in enumerate(own)]).to(k.device)
        absorbed = [n // call.chunk * call.chunk for n in lengths]
        starts = [(0, sum(absorbed[:i])) for i in long]

        def rows(x: Sequence[Tensor]) -> Tensor:
            room = x[0].new_zeros(sum(grid.active) * call.chunk, *x[0].shape[2:])
            tokens = torch.cat([x[i] for i in long], 1)[0]
            return room.index_copy(0, places, tokens).unflatten(0, (-1, call.chunk))

        q, k, v = (rows(x) for x in pieces)
        out, slot, _ = chunks(call, grid, q, k, v, None, starts)
        out = out.flatten(0, 1).index_select(0, places)[None]
        for s, (i, piece) in enumerate(zip(long, out.split(own, 1), strict=True)):
            y[i] = piece
            slots[i] = torch.cat([slot[row] for row in grid.entered(s)], -1)[None]
    return torch.cat([y[i] for i in range(len(lengths))], 1), torch.cat(slots, 2)
