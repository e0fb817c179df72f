"""RWKV-7's recurrence as a function: a matrix state per head with a diagonal-plus-rank-one transition.

Per head, with log decay l, a key-first state M `[K, V]` and column vectors:

    M_t = diag(exp l_t) M_{t-1} + b_t (a_t^T M_{t-1}) + k_t v_t^T,     o_t = M_t^T r_t

`steps` computes it so, token by token; `chunked` in chunks of up to 64 tokens, as matrix products. Inside a
chunk, with c the running sum of l (c' without the token's own) and m half of the chunk's total,

    r~ = r e^(c-m),  a~ = a e^(c'-m),  k~ = k e^(m-c),  b~ = b e^(m-c),  M~ = e^m M  (M before the chunk)
    scores  [Qk Qb; Ak Ab] = [r~; a~] [k~; b~]^T,  Q lower triangular, A strictly lower triangular
    reads   U = (I - Ab)^-1 (Ak v + a~ M~)                 row t is a_t^T M_{t-1}
    output  O = Qk v + Qb U + r~ M~
    state   M <- e^m (M~ + k~^T v + b~^T U)

RWKV-7's l is above -0.6066, so centring by m keeps every factor of a 64-token chunk within e^20.

Shapes: B sequences, T tokens, H heads, K key and V value width, n chunks of L tokens; X = B * H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import full_precision
from .chunked import (
    CHUNK_GPU,
    ChunkLayout,
    Recurrence,
    add_products,
    centred_growth,
    folded,
    product,
    walk,
    walk_back,
)
from .fla import fla_kernel

CHUNK = 32
"""Tokens in a chunk at most, on a CPU."""
FEW = 8
"""Calls shorter than this go token by token."""
LEAST_LOG_DECAY = -0.6065306597126334  # -exp(-1/2)


def rwkv7_recurrence(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    state: Tensor | None = None,
    lengths: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs for every token, and the state after the last.

    Args:
        r, k, a, b: `[B, T, H, K]`.
        log_decay: `[B, T, H, K]`, from -exp(-1/2) to 0.
        v: `[B, T, H, V]`.
        state: M before the first token `[B, H, K, V]`, key index first, fp32 or wider; None: zero.
        lengths: documents packed in the row (B is 1, no state): each starts from zero. The state returned is
            then the last document's.
        dtype: what the model computes in, which decides on the kernels; None: r's.

    Returns:
        `[B, T, H, V]` and `[B, H, K, V]`, both in at least fp32 (outputs of the kernels in `dtype`).
    """
    assert state is None or len(lengths) < 2
    name = "fla.ops.rwkv7.{}:{}_rwkv7"  # with the bound it takes tensor cores, on 64 tokens instead of 16
    kernel = fla_kernel(name, r, r.shape[-1], dtype or r.dtype, lower_bound=LEAST_LOG_DECAY)
    if kernel is not None:  # its states are laid out as ours
        return kernel({"r": r, "k": k, "v": v, "a": a, "b": b}, {"w": log_decay}, 1.0, state, lengths)
    wide = torch.promote_types(r.dtype, torch.float32)
    r, log_decay, k, v, a, b = (x.to(wide) for x in (r, log_decay, k, v, a, b))
    if state is None:
        batch, _, heads, size = r.shape
        state = r.new_zeros(batch, heads, size, v.shape[-1])
    with torch.autocast(r.device.type, enabled=False), full_precision(r):
        if r.shape[1] < FEW and len(lengths) < 2:
            return steps(r, log_decay, k, v, a, b, state.to(wide))
        return chunked(r, log_decay, k, v, a, b, state.to(wide), lengths)


def steps(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute token by token: arguments and results as in `rwkv7_recurrence`, which sees to dtypes."""
    inserts = torch.stack((b, k), -1)  # [B, T, H, K, 2]
    tokens = (r[..., None, :], log_decay.exp()[..., None], inserts, v[..., None, :], a[..., None, :])
    out = []
    for r_t, decay_t, insert_t, v_t, a_t in zip(*(x.unbind(1) for x in tokens), strict=True):
        rows = torch.cat((a_t @ state, v_t), -2)  # [B, H, 2, V]
        state = decay_t * state + insert_t @ rows
        out.append(r_t @ state)
    return torch.cat(out, -2).transpose(1, 2), state


@torch.compiler.disable  # compiling would unroll the loop over chunks
def chunked(
    r: Tensor,
    log_decay: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    state: Tensor,
    lengths: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Compute in chunks: arguments and results as in `rwkv7_recurrence`, which sees to dtypes. Tokens of
    zeros, which fill a last chunk, leave the state as it is."""
    size = CHUNK_GPU if r.device.type == "cuda" else CHUNK
    layout = ChunkLayout.of(r.shape[1], size, lengths, r.device)
    operands = [layout.split(x) for x in (r, log_decay, k, v, a, b)]
    out, memory = CHUNKED.run(layout.starts, state.flatten(0, 1), operands)
    return layout.join(out), memory.view(state.shape)


class _Scores(NamedTuple):
    """What the tokens of each chunk are to each other, for a group of chunks `[n, X, ...]`."""

    left: Tensor  # [.., 2L, K]: r~ over a~
    right: Tensor  # [.., 2L, K]: k~ over b~
    scores: Tensor  # [.., 2L, 2L]: [Qk Qb; Ak Ab]
    inverse: Tensor  # [.., L, L]: (I - Ab)^-1
    grow: Tensor  # [.., L, K]: e^(c-m)
    grow_before: Tensor  # [.., L, K]: e^(c'-m)
    scale: Tensor  # [.., K, 1]: e^m


def _scores(r: Tensor, log_decay: Tensor, k: Tensor, a: Tensor, b: Tensor) -> _Scores:
    """Compute scores from operands `[n, B, H, L, K]` of any layout."""
    size = r.shape[-2]
    grow = centred_growth(log_decay)
    grow_before = torch.cat((1 / grow[..., -1:, :], grow[..., :-1, :]), -2)
    left, right = (r.new_empty(*r.shape[:3], 2 * size, r.shape[-1]) for _ in range(2))
    torch.mul(r, grow, out=left[..., :size, :])
    torch.mul(a, grow_before, out=left[..., size:, :])
    torch.div(k, grow, out=right[..., :size, :])
    torch.div(b, grow, out=right[..., size:, :])
    left, right, grow, grow_before = (x.flatten(1, 2) for x in (left, right, grow, grow_before))
    scores = (left @ right.mT).mul_(_seen(size, r))
    eye = torch.eye(size, dtype=r.dtype, device=r.device).expand(*scores.shape[:-2], size, size)
    inverse = torch.linalg.solve_triangular(-scores[..., size:, size:], eye, upper=False, unitriangular=True)
    return _Scores(left, right, scores, inverse, grow, grow_before, grow[..., -1:, :].mT)


def _seen(size: int, like: Tensor) -> Tensor:
    """Make the mask `[2L, 2L]`, 1 where a row sees a column, else 0. Outputs see tokens up to their own,
    reads only earlier ones. (A factor: what it hides is finite, and filling is far slower.)"""
    every = like.new_ones(size, size)
    return torch.cat((every.tril(), every.tril(-1))).repeat(1, 2)


def _forward(operands: list[Tensor], memories: Tensor, starts: Sequence[bool], out: Tensor) -> None:
    """One group of chunks (see `Recurrence.forward`): operands r, log_decay, k, v, a, b; M `[X, K, V]`."""
    r, decay, k, v, a, b = (x.transpose(2, 3) for x in operands)
    size, v = v.shape[-2], v.flatten(1, 2)
    s = _scores(r, decay, k, a, b)
    start, end = (x.mul_(s.scale.mT) for x in (s.left, s.right))
    y, own = (s.scores[..., :size] @ v).split(size, -2)
    inverse, (reads, left) = folded(s.inverse, own.contiguous(), start[..., size:, :])
    added = end[..., :size, :].mT @ v
    walk(starts, memories, s.scale.square(), added, reads, left, end[..., size:, :], inverse)
    y = add_products(start[..., :size, :] @ memories[:-1], s.scores[..., :size, size:], reads).add_(y)
    out.transpose(2, 3).copy_(y.view(r.shape[:3] + y.shape[2:]))


def _backward(
    operands: list[Tensor], memories: Tensor, d_memories: Tensor, starts: Sequence[bool], into: list[Tensor]
) -> None:
    """The same backward (see `Recurrence.backward`); `d_x` is the gradient of x."""
    r, log_decay, k, v, a, b, grad = (x.transpose(2, 3) for x in operands)
    into = [x.transpose(2, 3) for x in into]
    size, heads = r.shape[-2], r.shape[1:3]
    s = _scores(r, log_decay, k, a, b)
    scaled = s.scale * memories[:-1]
    rows, d_rows = (v.new_empty(*s.left.shape[:-1], v.shape[-1]) for _ in range(2))
    (values, reads), (d_out, d_own) = (x.split(size, -2) for x in (rows, d_rows))
    values.unflatten(1, heads).copy_(v)
    own = add_products(s.scores[..., size:, :size] @ values, s.left[..., size:, :], scaled)
    reads.copy_(s.inverse @ own)
    # Gradients of the rows that `left` gives: of o, and of what (I - Ab)^-1 is applied to.
    d_out.unflatten(1, heads).copy_(grad)
    d_reads, start = s.scores[..., :size, size:].mT @ d_out, s.left * s.scale.mT
    product(start[..., :size, :].mT, d_out, d_memories[:-1])
    inverse, (left,) = folded(s.inverse, start[..., size:, :])
    right = s.right[..., size:, :] * s.scale.mT
    walk_back(starts, d_memories, s.scale.square(), d_reads, left, right, inverse)
    d_own.copy_(d_reads if inverse is not None else s.inverse.mT @ d_reads)
    d_sum = s.scale * d_memories[1:]  # of M~ + k~^T v + b~^T U
    d_scores = (d_rows @ rows.mT).mul_(_seen(size, grad))
    d_left = add_products(d_scores @ s.right, d_rows, scaled.mT)
    d_right = add_products(d_scores.mT @ s.left, rows, d_sum.mT)
    d_v = add_products(s.scores[..., :size].mT @ d_rows, s.right[..., :size, :], d_sum)
    # m cancels out of everything, so c can take all of the exponents' gradient.
    d_log, d_before = (d_left * s.left).split(size, -2)
    d_log = d_log + d_before
    d_log.addcmul_(d_right[..., :size, :], s.right[..., :size, :], value=-1)
    d_log.addcmul_(d_right[..., size:, :], s.right[..., size:, :], value=-1)
    d_log[..., -1, :] += (d_sum * memories[1:]).sum(-1) / s.scale.squeeze(-1)
    d_decay = log_decay.new_ones(size, size).triu() @ d_log - d_before
    into[1].copy_(d_decay.unflatten(1, heads))
    into[3].copy_(d_v.unflatten(1, heads))
    d_left, d_right, grow, before = (x.unflatten(1, heads) for x in (d_left, d_right, s.grow, s.grow_before))
    torch.mul(d_left[..., :size, :], grow, out=into[0])
    torch.mul(d_left[..., size:, :], before, out=into[4])
    torch.div(d_right[..., :size, :], grow, out=into[2])
    torch.div(d_right[..., size:, :], grow, out=into[5])


CHUNKED = Recurrence(_forward, _backward, value=3)
