"""The gated delta rule: a matrix state that decays and is corrected towards the newest value.

Per value head, with log decay g (a number, or one per key channel), write strength beta and key k:

    S <- e^g S;   S <- S + k beta (v - S^T k)^T;   o = S^T q * scale          S `[K, V]`

(Gated DeltaNet and Kimi Delta Attention papers.) Value head j reads query/key head j // (HV / H).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunks import LEAST_DECAY, Cut, running_decay
from .kernels import borders, fla_function, recurrent

CHUNK = 32  # tokens; measured on a CPU against 16 and 64
SEGMENT = 16  # chunks
NARROW = -120.0  # log decay of a chunk down to which fp32 holds its factors, from e^-60 to e^60
STEPS = 4  # up to so many tokens are done one by one


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    state: Tensor | None = None,
    lengths: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs for every token, and the state after the last.

    Args:
        q, k: `[B, T, H, K]`, k of length 1 or less.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: `[B, T, HV]`, or `[B, T, HV, K]` for a decay per key channel; at most 0.
        beta: `[B, T, HV]`, from 0 to 2.
        scale: of the queries; None: 1 / sqrt(K).
        state: `[B, HV, K, V]`, fp32 or wider; None: zero.
        lengths: documents packed in the row (B is 1, no state): each starts from zero. The state returned is
            then the last document's.
        dtype: what the model computes in, which decides on the kernels; None: q's.

    Returns:
        `[B, T, HV, V]` and `[B, HV, K, V]`, both in at least fp32 (outputs of the kernels in `dtype`).
    """
    assert state is None or len(lengths) < 2
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    found = _kernel(q, k, v, g, beta, scale, state, lengths, dtype or q.dtype)
    if found is not None:
        return found
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    if state is not None:
        state = state.to(wide)
    if g.ndim < q.ndim:
        g = g[..., None]
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) if group > 1 else x for x in (q if scale == 1 else q * scale, k))
    with torch.autocast(q.device.type, enabled=False):
        if q.shape[1] <= STEPS and len(lengths) < 2:
            return _steps(q, k, v, g, beta, state)
        return _chunks(q, k, v, g, beta, state, lengths)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    state: Tensor | None,
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """By fla, or None. Its states are laid out as ours."""
    short, channels = recurrent(q.shape[1]), g.ndim == q.ndim
    if channels:
        name = "fla.ops.kda:" + ("fused_recurrent_kda" if short else "chunk_kda")
    else:
        name = "fla.ops.gated_delta_rule:" + ("fused_recurrent" if short else "chunk") + "_gated_delta_rule"
    run = fla_function(name, q.new_empty(0, dtype=dtype), q.shape[-1])
    if run is None:
        return None
    q, k, v = (x.to(dtype) for x in (q, k, v))
    cu_seqlens = borders(lengths, q.device)
    o, states = run(
        q=q, k=k, v=v, g=g, beta=beta.to(dtype), scale=scale, initial_state=state,
        output_final_state=True, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, states[-1:] if cu_seqlens is not None else states


def _steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Token by token; heads already repeated, g `[B, T, HV, 1 or K]`."""
    if state is None:
        state = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1])
    decay, outs = g.exp(), []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, :, None]
        k_BH1K = k[:, t, :, None]
        u = beta[:, t, :, None, None] * (v[:, t, :, None] - k_BH1K @ state)
        state = state + k_BH1K.mT @ u
        outs.append(q[:, t, :, None] @ state)
    return torch.cat(outs, 2).transpose(1, 2), state


@torch.compiler.disable  # compiling would unroll the loop over chunks
def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """In chunks, SEGMENT of them at a time, so that what is computed on the way stays in the caches."""
    cut = Cut.of(q.shape[1], CHUNK, lengths, q.device)
    if state is None:
        state = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1])
    outs = []
    segments = zip(*(cut.split(x).split(SEGMENT) for x in (q, k, v, g, beta[..., None])), strict=True)
    for number, inputs in enumerate(segments):
        starts = cut.starts[number * SEGMENT : (number + 1) * SEGMENT]
        out, state = _Segment.apply(*inputs, state, starts)
        outs.append(out)
    return cut.join(torch.cat(outs)), state


class _Segment(torch.autograd.Function):
    """All chunks of a segment at once but for the recurrence of the state M `[K, V]` at their borders.

    Within a chunk every token's correction depends on those before it, a unit lower triangular system
    (Gated DeltaNet paper, "WY representation"). With c the running sum of g in a chunk and c_L its end:

        read_ij = q_i . k_j e^(c_i - c_j), i >= j;   own_ij = k_i . k_j e^(c_i - c_j), i > j
        solve = (I + diag(beta) own)^-1 diag(beta);  u = solve v;  w = solve (k e^c)
        r = u - w M;   o = (q e^c) M + read r;   M <- e^(c_L) M + (k e^(c_L - c))^T r

    The backward is written out, as autograd would keep and copy three times as much.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        starts: tuple[bool, ...],
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[N, B, L, HV, ...]`, state `[B, HV, K, V]`; the same for the results."""
        q, k, v, g, beta = (_heads_first(x) for x in (q, k, v, g, beta))
        total = running_decay(g, -2)
        down, rest = _factors(total, k.dtype)
        read, own = _scores(q, k, total)
        one = torch.eye(q.shape[-2], dtype=k.dtype, device=k.device).expand_as(own)
        inverse = torch.linalg.solve_triangular(beta * own, one, upper=False, unitriangular=True)
        solve = inverse * beta.mT
        r, w, k_rest, decay = solve @ v, solve @ (k * down), k * rest, down[:, :, -1, :, None]
        shape, state = state.shape, state.flatten(0, 1)
        before = v.new_empty(len(starts), *state.shape)
        for n, fresh in enumerate(starts):
            if fresh:
                state = torch.zeros_like(state)
            before[n] = state
            r[n].baddbmm_(w[n], state, alpha=-1)
            state = torch.baddbmm(state * decay[n], k_rest[n].mT, r[n])
        out = (q * down) @ before + read @ r
        ctx.save_for_backward(q, k, v, g, beta, total, read, own, inverse, r, w, before)
        ctx.starts, ctx.shape = starts, shape
        return _heads_last(out, shape[0]), state.unflatten(0, shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_out.device.type, enabled=False):
            return _segment_backward(ctx, d_out, d_last)


def _segment_backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of `_Segment`'s inputs; `d_x` is that of x."""
    q, k, v, g, beta, total, read, own, inverse, r, w, before = ctx.saved_tensors
    down, rest = _factors(total, k.dtype)
    solve, k_down, k_rest, decay = inverse * beta.mT, k * down, k * rest, down[:, :, -1, :, None]
    d_out = _heads_first(d_out)
    d_q_down, d_before = d_out @ before.mT, (q * down).mT @ d_out
    d_read, d_r = d_out @ r.mT, read.mT @ d_out
    d_after, grad = torch.empty_like(before), d_last.flatten(0, 1)
    for n in reversed(range(len(ctx.starts))):
        d_after[n] = grad
        d_r[n].baddbmm_(k_rest[n], grad)
        grad = torch.baddbmm(torch.addcmul(d_before[n], grad, decay[n]), w[n].mT, d_r[n], alpha=-1)
        if ctx.starts[n]:
            grad = torch.zeros_like(grad)
    d_w, d_k_rest = -(d_r @ before.mT), r @ d_after.mT

    d_solve = d_r @ v.mT + d_w @ k_down.mT
    d_v, d_k_down = solve.mT @ d_r, solve.mT @ d_w
    d_system = -(inverse.mT @ (d_solve * beta.mT) @ inverse.mT)
    d_system = d_system.tril(-1)
    d_beta = (d_solve * inverse).sum(-2)[..., None] + (d_system * own).sum(-1, keepdim=True)
    d_q, d_k, d_total = _scores_backward(q, k, total, read, own, d_read, d_system * beta)

    d_down, d_rest = d_q_down * q + d_k_down * k, d_k_rest * k
    d_decay = (d_after * before).sum(-1)[..., None, :]
    if g.shape[-1] == 1:
        d_down, d_rest, d_decay = (x.sum(-1, keepdim=True) for x in (d_down, d_rest, d_decay))
    d_q.addcmul_(d_q_down, down)
    d_k.addcmul_(d_k_down, down).addcmul_(d_k_rest, rest)
    d_rest = d_rest * rest
    d_total += d_down * down - d_rest
    d_total[..., -1:, :] += d_rest.sum(-2, keepdim=True) + d_decay * down[..., -1:, :]
    d_g = d_total.sum(-2, keepdim=True) - d_total.cumsum(-2) + d_total
    d_g = d_g.masked_fill(g < LEAST_DECAY, 0).to(g.dtype)
    batch = ctx.shape[0]
    gradients = (_heads_last(x, batch) for x in (d_q, d_k, d_v, d_g, d_beta))
    return *gradients, grad.unflatten(0, ctx.shape[:2]), None


def _heads_first(x: Tensor) -> Tensor:
    """`[N, B, L, HV, ...]` to `[N, B * HV, L, ...]`."""
    return x.transpose(2, 3).contiguous().flatten(1, 2)


def _heads_last(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(1, (batch, -1)).transpose(2, 3)


def _factors(total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decay from the chunk's start to each token, and from each token to the chunk's end."""
    return total.exp().to(dtype), (total[..., -1:, :] - total).exp().to(dtype)


def _scores(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """`read` and `own` (of which only what is below the diagonal counts) `[..., L, L]`, for a running decay
    `total` `[..., L, 1]` of all channels or `[..., L, K]` of each."""
    if total.shape[-1] == 1:
        decay = _pair_decay(total, q.dtype)
        return (q @ k.mT) * decay, (k @ k.mT) * decay
    rows, columns, _, _ = _channel_factors(q, k, total)
    read, own = (rows @ columns.mT).chunk(2, -2)
    hidden = _hidden(total)
    return read.masked_fill(hidden, 0).to(q.dtype), own.masked_fill(hidden, 0).to(q.dtype)


def _scores_backward(
    q: Tensor, k: Tensor, total: Tensor, read: Tensor, own: Tensor, d_read: Tensor, d_own: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and total (in float64); `d_own` is zero on the diagonal and above."""
    if total.shape[-1] == 1:
        decay = _pair_decay(total, q.dtype)
        by_decay = (d_read * read + d_own * own).double()
        d_total = (by_decay.sum(-1) - by_decay.sum(-2))[..., None]
        d_read, d_own = d_read * decay, d_own * decay
        return d_read @ k, (d_own + d_own.mT) @ k + d_read.mT @ q, d_total
    rows, columns, up, back = _channel_factors(q, k, total)
    d_scores = torch.cat((d_read.tril(), d_own), -2).to(rows.dtype)
    d_rows, d_columns = d_scores @ columns, d_scores.mT @ rows
    by_row, by_column = d_rows * rows, d_columns * columns
    d_q, d_own_k = (d_rows.unflatten(-2, (2, -1)) * up.unsqueeze(-3)).to(q.dtype).unbind(-3)
    d_k = d_own_k + (d_columns * back).to(k.dtype)
    return d_q, d_k, (by_row.unflatten(-2, (2, -1)).sum(-3) - by_column).double()


def _hidden(total: Tensor) -> Tensor:
    """`[L, L]`, true where a token would see a later one."""
    return torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)


def _pair_decay(total: Tensor, dtype: torch.dtype) -> Tensor:
    """`e^(c_i - c_j)` for i >= j, else 0: `[..., L, L]`, of `[..., L, 1]`."""
    return (total - total.mT).masked_fill(_hidden(total), -torch.inf).to(dtype).exp()


def _channel_factors(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q and k below each other, times `e^(c - c_L / 2)`, and k times the inverse, with both factors.

    Their products have the decays `e^(c_i - c_j)`. float64 holds the factors of any chunk of 32, which decays
    by at most e^(-32 * 40); products that overflow are of a token with a later one, and are not used. Where
    looking costs nothing, slow decays are computed in q's dtype, twice as fast.
    """
    centred = total - total[..., -1:, :] / 2
    if total.device.type == "cpu" and float(total[..., -1, :].min()) >= NARROW:
        centred = centred.to(q.dtype)
    up, back = centred.exp(), (-centred).exp()
    return torch.cat((q * up, k * up), -2), k * back, up, back
