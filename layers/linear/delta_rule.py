"""The gated delta rule: a matrix state that decays and is corrected towards the newest value.

Per value head, with log decay g (a number, or one per key channel), write strength beta and key k:

    S <- e^g S;   S <- S + k beta (v - S^T k)^T;   o = S^T q * scale          S `[K, V]`

(Gated DeltaNet and Kimi Delta Attention papers.) Value head j reads query/key head j // (HV / H).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import Cut, delta_scan, running_decay
from .kernels import borders, fla_function, recurrent

CHUNK = 32  # tokens; measured on a CPU against 16 and 64
SEGMENT = 16  # chunks
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
    q, k, v = (x.to(dtype) for x in (q, k, v))
    run = fla_function(name, q, q.shape[-1])
    if run is None:
        return None
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
        out, state = _segment(*inputs, state, starts)
        outs.append(out)
    return cut.join(torch.cat(outs)), state


def _segment(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, starts: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """All chunks `[N, B, L, HV, ...]` at once but for the recurrence of the state at their borders.

    Within a chunk every token's correction depends on those before it, a unit lower triangular system
    (Gated DeltaNet paper, "WY representation").
    """
    q, k, v, g, beta = (x.transpose(2, 3).contiguous() for x in (q, k, v, g, beta))  # [N, B, HV, L, ...]
    total = running_decay(g, -2)
    down = total.exp().to(k.dtype)  # from the chunk's start to each token
    rest = (total[..., -1:, :] - total).exp().to(k.dtype)  # from each token to the chunk's end
    read, own = (_channel_scores if g.shape[-1] > 1 else _scores)(q, k, total)
    one = torch.eye(q.shape[-2], dtype=k.dtype, device=k.device).expand_as(own)
    inverse = torch.linalg.solve_triangular(beta * own, one, upper=False, unitriangular=True)
    inverse = inverse * beta.mT
    u = inverse @ v
    w = (inverse * down.mT) @ k if g.shape[-1] == 1 else inverse @ (k * down)
    r, before, last = delta_scan(u, w, k * rest, down[..., -1:, :].mT, state, starts)
    out = (q * down) @ before + read @ r
    return out.transpose(2, 3), last


def _scores(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products of each token with those before it: q with k up to itself, and k with k (of which
    only what is below the diagonal counts), both `[..., L, L]`; `total` `[..., L, 1]`, one decay for all."""
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    decay = (total - total.mT).masked_fill(hidden, -torch.inf).to(q.dtype).exp()
    return (q @ k.mT) * decay, (k @ k.mT) * decay


def _channel_scores(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The same for decays per channel, `total` `[..., L, K]`.

    `e^(c_i - c_j)` is split in two factors about half the chunk's decay, in float64, whose range holds both:
    a chunk of 32 decays by at most e^(-32 * 40). What overflows lies above the diagonal.
    """
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    centred = total - total[..., -1:, :] / 2
    rows = torch.cat((q, k), -2).double() * torch.cat((centred, centred), -2).exp()
    products = rows @ (k.double() * (-centred).exp()).mT
    read, own = products.chunk(2, -2)
    return read.masked_fill(hidden, 0).to(q.dtype), own.masked_fill(hidden, 0).to(q.dtype)
