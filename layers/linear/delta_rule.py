"""The gated delta rule: a matrix state that decays and is corrected towards the newest value.

Per value head, with log decay g (a number, or one per key channel), write strength beta and key k:

    S <- e^g S;   S <- S + k beta (v - S^T k)^T;   o = S^T q * scale          S `[K, V]`

(Gated DeltaNet and Kimi Delta Attention papers.) Value head j reads query/key head j // (HV / H).

In chunks, with c the running sum of g in a chunk, m half of the chunk's total, and M the state before it,

    q~ = q e^(c-m),  k~ = beta k e^(c-m),  k^ = k e^(m-c),  M~ = e^m M
    scores  [Q; A] = [q~; k~] k^^T, Q lower triangular, A strictly lower triangular
    writes  U = (I + A)^-1 (beta v - k~ M~)
    output  O = Q U + q~ M~
    state   M <- e^m (M~ + k^^T U)

Shapes: B sequences, T tokens, HV heads, K key and V value width, n chunks of L tokens; X = B * HV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import full_precision
from .chunked import Recurrence, add_products, centred_growth, choose_chunks, folded, product, walk, walk_back
from .fla import fla_kernel

CHUNKS = (32, 16)
"""Tokens in a chunk at most; the shorter where the longer decays too much."""
STEPS = 4
"""Up to so many tokens are done one by one."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    normalise: bool = False,
    state: Tensor | None = None,
    lengths: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs for every token, and the state after the last.

    Args:
        q, k: `[B, T, H, K]`, k of length 1 or less, unless they are normalised here.
        v: `[B, T, HV, V]`, HV a multiple of H.
        g: `[B, T, HV]`, or `[B, T, HV, K]` for a decay per key channel; at most 0.
        beta: `[B, T, HV]`, from 0 to 2.
        scale: of the queries; None: 1 / sqrt(K).
        normalise: divide q and k by their lengths first (whose squares 1e-6 is added to).
        state: `[B, HV, K, V]`, fp32 or wider; None: zero.
        lengths: documents packed in the row (B is 1, no state): each starts from zero. The state returned is
            then the last document's.
        dtype: what the model computes in, which decides on the kernels; None: q's.

    Returns:
        `[B, T, HV, V]` and `[B, HV, K, V]`, both in at least fp32 (outputs of the kernels in `dtype`).
    """
    assert state is None or len(lengths) < 2
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    name = "fla.ops.kda:{}_kda" if g.ndim == q.ndim else "fla.ops.gated_delta_rule:{}_gated_delta_rule"
    kernel = fla_kernel(name, q, q.shape[-1], dtype or q.dtype)
    if kernel is not None:  # its states are laid out as ours
        operands = {"q": q, "k": k, "v": v, "beta": beta}
        return kernel(operands, {"g": g}, scale, state, lengths, use_qk_l2norm_in_kernel=normalise)
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    if g.ndim < q.ndim:
        g = g[..., None]
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) if group > 1 else x for x in (q if scale == 1 else q * scale, k))
    with torch.autocast(q.device.type, enabled=False), full_precision(q):
        if q.shape[1] <= STEPS and len(lengths) < 2:
            return _steps(q, k, v, g, beta, state.to(wide))
        return _chunks(q, k, v, g, beta, state.to(wide), lengths)


def _steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute token by token; heads already repeated, g `[B, T, HV, 1 or K]`."""
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
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    dtype = v.dtype
    layout, g = choose_chunks(g, CHUNKS, lengths)
    q, k, v, beta, state = (x.to(g.dtype) for x in (q, k, v, beta, state))
    operands = [layout.split(x) for x in (q, k, v, g, beta[..., None])]
    out, memory = CHUNKED.run(layout.starts, state.flatten(0, 1), operands)
    return layout.join(out).to(dtype), memory.view(state.shape).to(dtype)


class _Scores(NamedTuple):
    """What the tokens of each chunk are to each other, for a group of chunks `[n, X, ...]`."""

    left: Tensor  # [.., 2L, K]: q~ over k~
    q_left: Tensor  # its upper half
    k_left: Tensor  # its lower half
    right: Tensor  # [.., L, K]: k^
    read: Tensor  # [.., L, L]: Q
    inverse: Tensor  # [.., L, L]: (I + A)^-1
    grow: Tensor  # [.., L, K or 1]: e^(c-m)
    scale: Tensor  # [.., K or 1, 1]: e^m


def _scores(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> _Scores:
    """Compute scores from operands `[n, B, HV, L, ...]` of any layout."""
    size = q.shape[-2]
    grow = centred_growth(g)
    left, right = q.new_empty(*q.shape[:3], 2 * size, q.shape[-1]), q.new_empty(q.shape)
    torch.mul(q, grow, out=left[..., :size, :])
    torch.mul(k, grow * beta, out=left[..., size:, :])
    torch.div(k, grow, out=right)
    left, right, grow = (x.flatten(1, 2) for x in (left, right, grow))
    q_left, k_left = left.split(size, -2)
    read, own = (q_left @ right.mT).tril_(), k_left @ right.mT
    one = torch.eye(size, dtype=q.dtype, device=q.device).expand_as(own)
    inverse = torch.linalg.solve_triangular(own, one, upper=False, unitriangular=True)
    return _Scores(left, q_left, k_left, right, read, inverse, grow, grow[..., -1:, :].mT)


def _forward(operands: list[Tensor], memories: Tensor, starts: Sequence[bool], out: Tensor) -> None:
    """One group of chunks (see `Recurrence.forward`): operands q, k, v, g, beta; M `[X, K, V]`."""
    q, k, v, g, beta = (x.transpose(2, 3) for x in operands)
    s = _scores(q, k, g, beta)
    scale = s.scale.mT
    inverse, (writes, left) = folded(s.inverse, (v * beta).flatten(1, 2).contiguous(), s.k_left * -scale)
    walk(starts, memories, s.scale.square(), None, writes, left, s.right * scale, inverse)
    y = add_products((s.q_left * scale) @ memories[:-1], s.read, writes)
    out.transpose(2, 3).copy_(y.view(v.shape))


def _backward(
    operands: list[Tensor], memories: Tensor, d_memories: Tensor, starts: Sequence[bool], into: list[Tensor]
) -> None:
    """The same backward (see `Recurrence.backward`); `d_x` is the gradient of x."""
    q, k, v, g, beta, grad = (x.transpose(2, 3) for x in operands)
    into = [x.transpose(2, 3) for x in into]
    size, heads = q.shape[-2], q.shape[1:3]
    s = _scores(q, k, g, beta)
    scaled = s.scale * memories[:-1]
    writes = s.inverse @ add_products((v * beta).flatten(1, 2).contiguous(), s.k_left, scaled, -1)
    # Gradients of the rows that `left` gives: of o, and minus that of what (I + A)^-1 is applied to.
    d_rows = grad.new_empty(*s.left.shape[:-1], v.shape[-1])
    d_out, d_rest = d_rows.split(size, -2)
    d_out.unflatten(1, heads).copy_(grad)
    d_writes, scale = s.read.mT @ d_out, s.scale.mT
    product((s.q_left * scale).mT, d_out, d_memories[:-1])
    inverse, (left,) = folded(s.inverse, s.k_left * -scale)
    walk_back(starts, d_memories, s.scale.square(), d_writes, left, s.right * scale, inverse)
    torch.neg(d_writes if inverse is not None else s.inverse.mT @ d_writes, out=d_rest)
    d_sum = s.scale * d_memories[1:]  # of M~ + k^^T U
    seen = grad.new_ones(size, size)
    d_scores = (d_rows @ writes.mT).mul_(torch.cat((seen.tril(), seen.tril(-1))))
    d_left = add_products(d_scores @ s.right, d_rows, scaled.mT)
    d_right = add_products(d_scores.mT @ s.left, writes, d_sum.mT)
    # m cancels out of everything, so c can take all of the exponents' gradient.
    d_log = d_left * s.left
    d_log = (d_log[..., :size, :] + d_log[..., size:, :]).addcmul_(d_right, s.right, value=-1)
    d_log[..., -1, :] += (d_sum * memories[1:]).sum(-1) / s.scale.squeeze(-1)
    if g.shape[-1] == 1:
        d_log = d_log.sum(-1, keepdim=True)
    into[3].copy_((g.new_ones(size, size).triu() @ d_log).unflatten(1, heads))
    d_left, d_right, d_rest, grow = (x.unflatten(1, heads) for x in (d_left, d_right, d_rest, s.grow))
    d_q, d_key = d_left.split(size, -2)
    torch.mul(d_q, grow, out=into[0])
    d_key = d_key * grow  # of beta k
    torch.addcmul(d_right / grow, d_key, beta, out=into[1])
    torch.mul(d_rest, -beta, out=into[2])
    torch.sub((d_key * k).sum(-1, keepdim=True), (d_rest * v).sum(-1, keepdim=True), out=into[4])


CHUNKED = Recurrence(_forward, _backward, value=2)
