"""State space duality: a matrix state with one decay per head (Mamba-2 paper).

Per head, with log decay g, `S <- e^g S + x B^T;  o = S C`, S `[P, N]`. Head h uses group h // (H / G) of the
inputs B and outputs C of the state.

In chunks, with c the running sum of g in a chunk, m half of the chunk's total, and S the state before it,
here transposed to `[N, P]`,

    x~ = x e^(m-c),  S~ = e^m S,  Q = B's and C's products, lower triangular
    output  O = e^(c-m) (Q x~ + C S~)
    state   S <- e^m (S~ + B^T x~)

so that all M = H / G heads of a group share their products: x~ and S are `M P` wide there.

Shapes: T tokens, n chunks of L tokens, X = batch * G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import full_precision
from .chunked import Recurrence, add_products, centred_growth, choose_chunks, walk, walk_back
from .fla import fla_kernel

CHUNKS = (64, 32, 16)
"""Tokens in a chunk at most; the shorter where the longer decays too much."""
STEPS = 4
"""Up to so many tokens are done one by one."""


def ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    *,
    state: Tensor | None = None,
    lengths: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs for every token, and the state after the last.

    Args:
        x: `[B, T, H, P]`, what each token adds.
        b, c: `[B, T, G, N]`, H a multiple of G.
        g: `[B, T, H]`, at most 0.
        state: `[B, H, P, N]`, fp32 or wider; None: zero.
        lengths: documents packed in the row (B is 1, no state): each starts from zero. The state returned is
            then the last document's.
        dtype: what the model computes in, which decides on the kernels; None: x's.

    Returns:
        `[B, T, H, P]` and `[B, H, P, N]`, both in at least fp32 (outputs of the kernels in `dtype`).
    """
    assert state is None or len(lengths) < 2
    kernel = fla_kernel("fla.ops.simple_gla:{}_simple_gla", x, b.shape[-1], dtype or x.dtype)
    if kernel is not None:  # gated linear attention with a decay per head; its states are ours transposed
        group = x.shape[2] // b.shape[2]
        b, c = (z.repeat_interleave(group, 2) for z in (b, c))
        start = None if state is None else state.mT.contiguous()
        o, end = kernel({"q": c, "k": b, "v": x}, {"g": g}, 1.0, start, lengths)
        return o, end.mT
    wide = torch.promote_types(x.dtype, torch.float32)
    x, b, c, g = (z.to(wide) for z in (x, b, c, g))
    if state is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    with torch.autocast(x.device.type, enabled=False), full_precision(x):
        if x.shape[1] <= STEPS and len(lengths) < 2:
            return _steps(x, b, c, g, state.to(wide))
        return _chunks(x, b, c, g, state.to(wide), lengths)


def _steps(x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    group = x.shape[2] // b.shape[2]
    b, c = (z.repeat_interleave(group, 2) for z in (b, c))
    decay, outs = g.exp(), []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, None] + x[:, t, :, :, None] @ b[:, t, :, None]
        outs.append(state @ c[:, t, :, :, None])
    return torch.stack([out.squeeze(-1) for out in outs], 1), state


@torch.compiler.disable  # compiling would unroll the loop over chunks
def _chunks(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    dtype, heads = x.dtype, (b.shape[2], x.shape[2] // b.shape[2])
    layout, g = choose_chunks(g, CHUNKS, lengths)
    x, b, c, state = (z.to(g.dtype) for z in (x, b, c, state))
    memory = state.unflatten(1, heads).permute(0, 1, 4, 2, 3).flatten(0, 1)  # [X, N, M, P]
    out, memory = CHUNKED.run(layout.starts, memory, [layout.split(z) for z in (x, b, c, g)])
    state = memory.unflatten(0, (-1, heads[0])).permute(0, 1, 3, 4, 2).flatten(1, 2)
    return layout.join(out).to(dtype), state.to(dtype)


class _Rows(NamedTuple):
    """Operands of a group of chunks, `[n, X, ...]` but for `grow`."""

    x: Tensor  # [.., L, M * P]: x~
    b: Tensor  # [.., L, N]
    c: Tensor  # [.., L, N]
    read: Tensor  # [.., L, L]: Q
    scale: Tensor  # [.., 1, M, 1]: e^m
    grow: Tensor  # [n, B, L, H, 1]: e^(c-m)

    def to_tokens(self, y: Tensor) -> Tensor:
        """Take `[n, X, L, M * P]` to `[n, B, L, H, P]`."""
        batch, heads = self.grow.shape[1], self.scale.shape[-2]
        return y.unflatten(1, (batch, -1)).transpose(2, 3).unflatten(-1, (heads, -1)).flatten(3, 4)


def _by_group(z: Tensor, groups: int) -> Tensor:
    """Take `[n, B, L, H, D]` to `[n, X, L, H / G * D]`."""
    return z.unflatten(3, (groups, -1)).flatten(4).transpose(2, 3).flatten(1, 2)


def _rows(x: Tensor, b: Tensor, c: Tensor, g: Tensor) -> _Rows:
    """Compute rows from operands `[n, B, L, ...]`."""
    groups = b.shape[3]
    grow = centred_growth(g)[..., None]
    b, c = (_by_group(z, groups).contiguous() for z in (b, c))
    scale = grow[:, :, -1].unflatten(2, (groups, -1)).flatten(1, 2).unsqueeze(2)
    return _Rows(_by_group(x / grow, groups), b, c, (c @ b.mT).tril_(), scale, grow)


def _forward(operands: list[Tensor], memories: Tensor, starts: Sequence[bool], out: Tensor) -> None:
    """One group of chunks (see `Recurrence.forward`): operands x, b, c, g; the state is `[X, N, M, P]`."""
    s = _rows(*operands)
    added = (s.b.mT @ s.x).unflatten(-1, memories.shape[-2:]).mul_(s.scale)
    walk(starts, memories, s.scale.square(), added)
    y = add_products(s.read @ s.x, s.c, (memories[:-1] * s.scale).flatten(-2))
    torch.mul(s.to_tokens(y), s.grow, out=out)


def _backward(
    operands: list[Tensor], memories: Tensor, d_memories: Tensor, starts: Sequence[bool], into: list[Tensor]
) -> None:
    """The same backward (see `Recurrence.backward`); `d_z` is the gradient of z."""
    x, b, c, g, out, grad = operands
    s = _rows(x, b, c, g)
    d_y = _by_group(grad * s.grow, b.shape[3])
    scaled = (memories[:-1] * s.scale).flatten(-2)
    torch.mul((s.c.mT @ d_y).unflatten(-1, memories.shape[-2:]), s.scale, out=d_memories[:-1])
    walk_back(starts, d_memories, s.scale.square())
    d_after = d_memories[1:]
    d_sum = (d_after * s.scale).flatten(-2)  # of S~ + B^T x~
    d_scores = (d_y @ s.x.mT).tril_()
    d_x = add_products(s.read.mT @ d_y, s.b, d_sum)
    d_b = add_products(d_scores.mT @ s.c, s.x, d_sum.mT)
    d_c = add_products(d_scores @ s.b, d_y, scaled.mT)
    torch.div(s.to_tokens(d_x), s.grow, out=into[0])
    for place, found in zip(into[1:3], (d_b, d_c), strict=True):
        place.copy_(found.unflatten(1, (x.shape[1], -1)).transpose(2, 3))
    # m cancels out of everything, so c can take all of the exponents' gradient.
    d_log = (grad * out).sum(-1) - (into[0] * x).sum(-1)
    d_log[:, :, -1] += (d_after * memories[1:]).sum((-3, -1)).view(d_log[:, :, -1].shape)
    size = x.shape[2]
    torch.matmul(g.new_ones(size, size).triu(), d_log, out=into[3])


CHUNKED = Recurrence(_forward, _backward, value=0, keeps_outputs=True)
