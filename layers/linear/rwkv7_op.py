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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunks import Cut, exact_products, groups
from .kernels import borders, fla_function, recurrent

CHUNK = 64
"""Tokens in a chunk at most."""
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
    """Outputs for every token, and the state after the last.

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
    found = _kernel((r, log_decay, k, v, a, b), state, lengths, dtype or r.dtype)
    if found is not None:
        return found
    wide = torch.promote_types(r.dtype, torch.float32)
    r, log_decay, k, v, a, b = (x.to(wide) for x in (r, log_decay, k, v, a, b))
    if state is None:
        batch, _, heads, size = r.shape
        state = r.new_zeros(batch, heads, size, v.shape[-1])
    with torch.autocast(r.device.type, enabled=False):
        if r.shape[1] < FEW and len(lengths) < 2:
            return steps(r, log_decay, k, v, a, b, state.to(wide))
        return chunked(r, log_decay, k, v, a, b, state.to(wide), lengths)


def _kernel(
    operands: Sequence[Tensor], state: Tensor | None, lengths: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """By fla, or None. Its states are laid out as ours."""
    r, log_decay, k, v, a, b = operands
    if recurrent(r.shape[1]):
        name = "fla.ops.rwkv7.fused_recurrent:fused_recurrent_rwkv7"
    else:
        name = "fla.ops.rwkv7.chunk:chunk_rwkv7"
    run = fla_function(name, r.to(dtype), r.shape[-1])
    if run is None:
        return None
    r, k, v, a, b = (x.to(dtype) for x in (r, k, v, a, b))
    cu_seqlens = borders(lengths, r.device)
    o, states = run(
        r=r, w=log_decay, k=k, v=v, a=a, b=b, scale=1.0, initial_state=state, output_final_state=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, states[-1:] if cu_seqlens is not None else states


def steps(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: arguments and results as in `rwkv7_recurrence`, which sees to dtypes."""
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
    """In chunks: arguments and results as in `rwkv7_recurrence`, which sees to dtypes. Tokens of zeros, which
    fill a last chunk, leave the state as it is."""
    cut = Cut.of(r.shape[1], CHUNK, lengths, r.device)
    out, state = _Chunks.apply(cut.starts, state, *(cut.split(x) for x in (r, log_decay, k, v, a, b)))
    return cut.join(out), state


class _Scores(NamedTuple):
    """What a group of chunks is to its own tokens, `[n, X, ...]`."""

    left: Tensor  # [.., 2L, K]: r~ over a~
    right: Tensor  # [.., 2L, K]: k~ over b~
    scores: Tensor  # [.., 2L, 2L]: [Qk Qb; Ak Ab]
    inverse: Tensor  # [.., L, L]: (I - Ab)^-1
    scale: Tensor  # [.., K, 1]: e^m
    grow: Tensor  # [.., L, K]: e^(c-m)
    grow_before: Tensor  # [.., L, K]: e^(c'-m)


def _scores(r: Tensor, log_decay: Tensor, k: Tensor, a: Tensor, b: Tensor, seen: Tensor) -> _Scores:
    """From operands `[n, X, L, K]`; `seen` as from `_seen`."""
    total = log_decay.cumsum(-2)
    half = total[..., -1:, :] / 2
    grow = torch.exp(total - half)
    grow_before = torch.exp(total - log_decay - half)
    left = torch.cat((r * grow, a * grow_before), -2)
    right = torch.cat((k / grow, b / grow), -2)
    scores = (left @ right.mT).mul_(seen)
    size = r.shape[-2]
    eye = torch.eye(size, dtype=r.dtype, device=r.device).expand(*scores.shape[:-2], size, size)
    inverse = torch.linalg.solve_triangular(-scores[..., size:, size:], eye, upper=False, unitriangular=True)
    return _Scores(left, right, scores, inverse, half.exp().mT, grow, grow_before)


def _seen(like: Tensor) -> Tensor:
    """`[2L, 2L]` for chunks `[n, B, L, ...]`: 1 where a row sees a column, else 0. Outputs see tokens up to
    their own, reads only earlier ones. (A factor: what it hides is finite, and filling is far slower.)"""
    every = like.new_ones(like.shape[2], like.shape[2])
    return torch.cat((every.tril(), every.tril(-1))).repeat(1, 2)


class _Chunks(torch.autograd.Function):
    """All chunks. Kept for the backward: the operands and the state before every chunk."""

    @staticmethod
    def forward(ctx: Any, starts: Sequence[bool], state: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
        """Operands r, log_decay, k, v, a, b `[n, B, L, H, ...]`; `starts`: chunks that M is zero before."""
        value = operands[3]
        size = value.shape[2]
        seen = _seen(value)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        memory = state.flatten(0, 1)
        before = state.new_empty(len(value), *memory.shape)
        with exact_products(state):
            for span in groups(value):
                r, decay, k, v, a, b = (_heads_first(x[span]) for x in operands)
                s = _scores(r, decay, k, a, b, seen)
                own, fixed, mixing = _own(s, v)
                for i, chunk in enumerate(range(span.start, span.stop)):
                    if starts[chunk]:
                        memory = torch.zeros_like(memory)
                    before[chunk] = memory
                    scaled = s.scale[i] * memory
                    memory = s.scale[i] * torch.baddbmm(scaled + fixed[i], mixing[i], scaled)
                scaled = s.scale * before[span]
                reads = own + s.inverse @ (s.left[..., size:, :] @ scaled)
                y = s.scores[..., :size, :] @ torch.cat((v, reads), -2) + s.left[..., :size, :] @ scaled
                _put(out[span], y)
        ctx.save_for_backward(before, memory, *operands)
        ctx.starts = starts
        return out, memory.view(state.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        before, after, *operands = ctx.saved_tensors
        seen = _seen(grad)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands]
        d_memory = grad_state.flatten(0, 1)
        with torch.autocast(grad.device.type, enabled=False), exact_products(grad):
            for span in reversed(list(groups(grad))):
                following = before[span.stop] if span.stop < len(before) else after
                own = [_heads_first(x[span]) for x in (*operands, grad)]
                memories = before[span], following
                found, d_memory = _group_backward(own, memories, d_memory, seen, ctx.starts[span])
                for x, one in zip(grads, found, strict=True):
                    _put(x[span], one)
        return None, d_memory.view(grad_state.shape), *grads


def _own(s: _Scores, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of chunks that start from nothing: reads U `[.., L, V]` and what they leave, `k~^T v + b~^T U`
    `[.., K, V]`. And `b~^T (I - Ab)^-1 a~` `[.., K, K]`, by which a chunk mixes the state it starts from."""
    size = v.shape[-2]
    own = s.inverse @ (s.scores[..., size:, :size] @ v)
    fixed = s.right.mT @ torch.cat((v, own), -2)
    mixing = s.right[..., size:, :].mT @ (s.inverse @ s.left[..., size:, :])
    return own, fixed, mixing


def _group_backward(
    operands: list[Tensor],
    memories: tuple[Tensor, Tensor],
    d_memory: Tensor,
    seen: Tensor,
    starts: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:
    """One group of chunks.

    Args:
        operands: r, log_decay, k, v, a, b and the gradient of o, `[n, X, L, ...]`.
        memories: the state before each chunk `[n, X, K, V]` and after the last one.
        d_memory: gradient of the latter.
        starts: for each chunk, whether it starts from a zero state.

    Returns:
        Gradients of the six operands, and of the state before the first chunk.
    """
    r, log_decay, k, v, a, b, grad = operands
    size = r.shape[-2]
    s = _scores(r, log_decay, k, a, b, seen)
    write, read = s.left[..., :size, :], s.left[..., size:, :]
    late = s.right[..., size:, :]
    scaled = s.scale * memories[0]
    reads = s.inverse @ (s.scores[..., size:, :size] @ v + read @ scaled)
    weights = s.inverse @ read
    d_reads = s.scores[..., :size, size:].mT @ grad  # from the chunk's own outputs
    fixed = write.mT @ grad + weights.mT @ d_reads
    mixing = weights.mT @ late
    # Through the chunks backwards: gradients of e^-m M after each one, and of log e^m's two uses.
    d_after = torch.empty_like(scaled)
    d_total = log_decay.new_empty(*log_decay.shape[:2], log_decay.shape[-1])
    for i in reversed(range(len(scaled))):
        after = memories[0][i + 1] if i + 1 < len(scaled) else memories[1]
        torch.sum(d_memory * after, -1, out=d_total[i])
        d_after[i] = s.scale[i] * d_memory
        d_memory = s.scale[i] * torch.baddbmm(fixed[i] + d_after[i], mixing[i], d_after[i])
        if starts[i]:
            d_memory = torch.zeros_like(d_memory)
    d_solved = s.inverse.mT @ (d_reads + late @ d_after)
    d_rows = torch.cat((grad, d_solved), -2)
    rows = torch.cat((v, reads), -2)
    d_scores = (d_rows @ rows.mT).mul_(seen)
    d_left = d_scores @ s.right + d_rows @ scaled.mT
    d_right = d_scores.mT @ s.left + rows @ d_after.mT
    d_v = s.scores[..., :size].mT @ d_rows + s.right[..., :size, :] @ d_after
    # m cancels out of everything, so c can take all of the exponents' gradient.
    d_left_log, d_right_log = d_left * s.left, d_right * s.right
    d_before = d_left_log[..., size:, :]
    d_log = d_left_log[..., :size, :] + d_before - d_right_log[..., :size, :] - d_right_log[..., size:, :]
    d_log[..., -1, :] += d_total
    d_decay = d_log.flip(-2).cumsum(-2).flip(-2) - d_before
    d_r, d_a = d_left[..., :size, :] * s.grow, d_left[..., size:, :] * s.grow_before
    d_k, d_b = d_right[..., :size, :] / s.grow, d_right[..., size:, :] / s.grow
    return [d_r, d_decay, d_k, d_v, d_a, d_b], d_memory


def _heads_first(x: Tensor) -> Tensor:
    """`[n, B, L, H, D]` to `[n, X, L, D]`."""
    return x.transpose(2, 3).flatten(1, 2).contiguous()


def _put(out: Tensor, y: Tensor) -> None:
    """Write `y` `[n, X, L, D]` to `out` `[n, B, L, H, D]`."""
    out.copy_(y.unflatten(1, (out.shape[1], out.shape[3])).transpose(2, 3))
