"""Full, sliding-window and block-window attention as functions, for prompts and for cached continuation.

Queries are the last tokens of the keys ("bottom-right alignment"): of Tk keys, query i of Tq stands at key
`Tk - Tq + i`. A query without any visible key gives 0, with log-sum-exp -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import LayerError
from ..indices import index
from .grid import ChunkGrid, rows
from .joined import ALL, Part, joined_attention
from .kernels import Mask

Result = tuple[Tensor, Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    lengths: Sequence[int] = (),
) -> Result:
    """Compute softmax attention, causal or not, with an optional sliding window.

    Args:
        q: `[B, Tq, H, D]`.
        k, v: `[B, Tk, G, D]`, G a divisor of H; query head h reads head `h // (H / G)`.
        causal: a query sees keys up to its own place.
        window: it sees only the last `window` of them, its own included. Cost is linear in Tq.
        scale: of the logits; None: 1 / sqrt(D).
        lengths: documents packed in the row (B is 1 and Tq = Tk = their sum), which do not see each other.

    Returns:
        Output `[B, Tq, H, D]` in q's dtype, and log-sum-exp `[B, H, Tq]`, which carries no gradient.
    """
    q, k, v, scale = _prepared(q, k, v, scale)
    if window is not None and (window < 1 or not causal):
        raise LayerError(f"window must be 1 or more and causal, got window {window}, causal {causal}")

    def one(q: Tensor, k: Tensor, v: Tensor) -> Result:
        if window is not None and window < k.shape[1]:
            return _sliding(q, k, v, window, scale)
        return _full(q, k, v, causal, scale)

    return _by_document(one, q, k, v, lengths)


def block_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk: int,
    window_chunks: int,
    sinks: int = 0,
    position: int = 0,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    scale: float | None = None,
    lengths: Sequence[int] = (),
) -> Result:
    """Compute causal attention to the query's own chunk, the `window_chunks - 1` before it, and the first
    tokens.

    Chunks are aligned to absolute positions; arguments as in `attention`, and:

    Args:
        sinks: so many first tokens of the sequence are always visible.
        position: absolute position of the first query. The keys end with the last query and reach back at
            least to the start of the first query's window.
        sink_k, sink_v: `[B, >= sinks, G, D]`, the first tokens' keys and values; needed when `sinks` is not 0
            and `k` does not start at position 0.
    """
    q, k, v, scale = _prepared(q, k, v, scale)
    if not q.shape[1]:
        raise LayerError("block window attention needs at least one query")
    start = position + q.shape[1] - k.shape[1]
    window_start = max(0, (position // chunk + 1 - window_chunks) * chunk)
    if not 0 <= start <= window_start:
        raise LayerError(f"keys start at {start}; the window of position {position} is from {window_start}")
    if sinks and start > 0 and (sink_k is None or sink_v is None):
        raise LayerError(f"sink_k and sink_v are needed, as the keys start at position {start}")

    def one(q: Tensor, k: Tensor, v: Tensor) -> Result:
        first_k, first_v = (k, v) if sink_k is None or sink_v is None else (sink_k, sink_v)
        sources = ([k[:, window_start - start :]], [v[:, window_start - start :]])
        if sinks:
            sources[0].append(first_k[:, :sinks].to(k.dtype))
            sources[1].append(first_v[:, :sinks].to(v.dtype))
        return _block_window(q, *sources, chunk, window_chunks, position, scale)

    return _by_document(one, q, k, v, lengths)


def _prepared(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor, float]:
    if not q.ndim == k.ndim == 4:
        raise LayerError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must be [batch, tokens, heads, size]")
    if q.shape[2] % k.shape[2] or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise LayerError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    q, k, v = same_dtype(q, k, v)
    return q, k, v, 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def same_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the tensors to autocast's dtype where that is on (it does not reach our kernels); raise LayerError
    unless all have one dtype."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return tuple(t.to(dtype) for t in tensors)
    if len({t.dtype for t in tensors}) > 1:
        raise LayerError(f"q, k and v must have one dtype, got {', '.join(str(t.dtype) for t in tensors)}")
    return tensors


def _by_document(
    one: Callable[[Tensor, Tensor, Tensor], Result], q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]
) -> Result:
    if not lengths:
        return one(q, k, v)
    if min(lengths) < 1:
        raise LayerError(f"packed documents have lengths {tuple(lengths)}; leave empty ones out")
    if q.shape[0] != 1 or q.shape[1] != sum(lengths) or k.shape[1] != sum(lengths):
        raise LayerError(
            f"packed documents of {sum(lengths)} tokens, but q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    pieces = zip(*(x.split(list(lengths), 1) for x in (q, k, v)), strict=True)
    outs, lses = zip(*(one(*piece) for piece in pieces), strict=True)
    return torch.cat(outs, 1), torch.cat(lses, 2)


def _full(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Result:
    old = k.shape[1] - q.shape[1]
    blind = max(0, -old) if causal else 0  # queries before the first key
    parts = []
    if not causal or (old > 0 and q.shape[1] == 1):
        parts.append(Part())
    else:
        if old > 0:
            parts.append(Part(k_tokens=slice(0, old)))
        new = slice(max(0, old), None)
        parts.append(Part(q_tokens=slice(blind, None) if blind else ALL, k_tokens=new, mask=Mask.LOWER))
    if not (q.shape[1] and k.shape[1]):
        parts = []
    return joined_attention([q], [k], [v], parts, scale)


def _sliding(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Result:
    """Attend in rows of `window` tokens: a query sees its row causally, the rest of its window in the row
    before."""
    batch, tokens = q.shape[:2]
    blind = max(0, tokens - k.shape[1])
    if blind:
        q = q[:, blind:]
    old = min(k.shape[1] - q.shape[1], window - 1)
    k, v = (x[:, x.shape[1] - q.shape[1] - old :] for x in (k, v))
    if q.shape[1] == 1:
        out, lse = joined_attention([q], [k], [v], [Part()], scale)
    else:
        grid = ChunkGrid.equal(batch, old + q.shape[1], window)
        parts = grid.window_parts(1, q.device)
        later = [(s.query(c), s.key(c - 1)) for s in grid.spans for c in range(1, s.end)]
        if later and window > 1:
            before, after = slice(0, window - 1), slice(1, window)
            q_rows, k_rows = (rows(numbers, q.device) for numbers in zip(*later, strict=True))
            parts.append(Part(q_rows, before, k_rows=k_rows, k_tokens=after, mask=Mask.UPPER))
        padded = F.pad(q, (0, 0, 0, 0, old, 0))
        out, lse = joined_attention([grid.queries(padded)], [grid.keys(k)], [grid.keys(v)], parts, scale)
        out, lse = grid.tokens_of(out)[:, old:], _lse_of(grid, lse)[..., old:]
    if blind:
        out, lse = F.pad(out, (0, 0, 0, 0, blind, 0)), F.pad(lse, (blind, 0), value=-torch.inf)
    return out, lse


def _block_window(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    chunk: int,
    window_chunks: int,
    position: int,
    scale: float,
) -> Result:
    """`keys[0]` starts with the first query's window; `keys[1]`, if there, are the sinks."""
    tokens, held = q.shape[1], keys[0].shape[1] - q.shape[1]
    offset = position % chunk
    if offset + tokens <= chunk:  # within one chunk: no need for whole rows
        sinks = min(keys[1].shape[1], position - held) if len(keys) > 1 else 0
        parts = [Part(k_tokens=slice(0, held))] if held else []
        parts.append(Part(k_tokens=slice(held, None), mask=Mask.LOWER))
        parts += [Part(key=1, k_tokens=slice(0, sinks))] if sinks else []
        return joined_attention([q], keys, values, parts, scale)
    grid = ChunkGrid.equal(q.shape[0], tokens, chunk, position, held // chunk)
    parts = grid.window_parts(window_chunks, q.device)
    if len(keys) > 1:
        parts += _sink_parts(grid, keys[1].shape[1], window_chunks, q.device)
    keys, values = [grid.keys(keys[0]), *keys[1:]], [grid.keys(values[0]), *values[1:]]
    out, lse = joined_attention([grid.queries(q)], keys, values, parts, scale)
    return grid.tokens_of(out), _lse_of(grid, lse)


def _sink_parts(grid: ChunkGrid, sinks: int, window_chunks: int, device: torch.device) -> list[Part]:
    """Show chunks the sinks that their window does not hold, in one part for chunks that miss equally
    many."""
    readers: dict[int, list[tuple[int, int]]] = {}
    for sequence, span in enumerate(grid.spans):
        for c in range(max(span.first, window_chunks), span.end):
            missed = min(sinks, (c + 1 - window_chunks) * grid.chunk)
            readers.setdefault(missed, []).append((span.query(c), sequence))
    return [
        Part(rows([q for q, _ in seen], device), k_rows=index(tuple(b for _, b in seen), device),
             key=1, k_tokens=slice(0, missed))
        for missed, seen in readers.items()
    ]  # fmt: skip


def _lse_of(grid: ChunkGrid, lse: Tensor) -> Tensor:
    """Take `[rows, H, chunk]` to `[B, H, T]`."""
    return grid.tokens_of(lse.transpose(1, 2)).transpose(1, 2)
