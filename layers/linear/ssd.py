"""State space duality: a matrix state with one decay per head (Mamba-2 paper).

Per head, with log decay g, `S <- e^g S + x B^T;  o = S C`, S `[P, N]`. Head h uses group h // (H / G) of the
inputs B and outputs C of the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .chunks import Cut, decay_scan, running_decay
from .kernels import borders, fla_function, recurrent

CHUNK = 32  # tokens; measured on a CPU against 16 and 64
SEGMENT = 16  # chunks
STEPS = 4  # up to so many tokens are done one by one


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
    """Outputs for every token, and the state after the last.

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
    found = _kernel(x, b, c, g, state, lengths, dtype or x.dtype)
    if found is not None:
        return found
    wide = torch.promote_types(x.dtype, torch.float32)
    x, b, c, g = (z.to(wide) for z in (x, b, c, g))
    if state is None:
        state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    with torch.autocast(x.device.type, enabled=False):
        if x.shape[1] <= STEPS and len(lengths) < 2:
            return _steps(x, b, c, g, state.to(wide))
        return _chunks(x, b, c, g, state.to(wide), lengths)


def _kernel(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    state: Tensor | None,
    lengths: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:
    """By fla's gated linear attention with a decay per head, or None; its states are ours transposed."""
    form = "fused_recurrent" if recurrent(x.shape[1]) else "chunk"
    run = fla_function(f"fla.ops.simple_gla:{form}_simple_gla", x.new_empty(0, dtype=dtype), b.shape[-1])
    if run is None:
        return None
    x, b, c = (z.to(dtype) for z in (x, b, c))
    group = x.shape[2] // b.shape[2]
    cu_seqlens = borders(lengths, x.device)
    o, states = run(
        q=c.repeat_interleave(group, 2), k=b.repeat_interleave(group, 2), v=x, g=g, scale=1.0,
        initial_state=None if state is None else state.mT.contiguous(), output_final_state=True,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return o, (states[-1:] if cu_seqlens is not None else states).mT


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
    """In chunks, SEGMENT of them at a time, so that what is computed on the way stays in the caches."""
    cut = Cut.of(x.shape[1], CHUNK, lengths, x.device)
    state = state.unflatten(1, (b.shape[2], -1))
    outs = []
    segments = zip(*(cut.split(z).split(SEGMENT) for z in (x, b, c, g)), strict=True)
    for number, (x_n, b_n, c_n, g_n) in enumerate(segments):
        starts = cut.starts[number * SEGMENT : (number + 1) * SEGMENT]
        out, state = _segment(x_n, b_n, c_n, g_n, state, starts)
        outs.append(out)
    return cut.join(torch.cat(outs)), state.flatten(1, 2)


def _segment(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor, starts: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """All chunks `[N, B, L, ...]` at once; M heads share a group, and their products with it are one."""
    groups, size, width = b.shape[3], x.shape[2], x.shape[-1]
    x = x.unflatten(3, (groups, -1))  # [N, B, L, G, M, P]
    b, c = (z.transpose(2, 3).contiguous() for z in (b, c))  # [N, B, G, L, N]
    total = running_decay(g.unflatten(3, (groups, -1)).movedim(2, -1), -1)  # [N, B, G, M, L]
    hidden = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(hidden, -torch.inf).to(x.dtype).exp()
    out = ((c @ b.mT).unsqueeze(3) * decay) @ x.permute(0, 1, 3, 4, 2, 5)  # [N, B, G, M, L, P]

    rest = (total[..., -1:] - total).exp().to(x.dtype)
    kept = (x * rest.movedim(-1, 2)[..., None]).flatten(-2).transpose(2, 3)  # [N, B, G, L, M * P]
    added = (kept.mT @ b).unflatten(3, (-1, width))  # [N, B, G, M, P, N]
    whole = total[..., -1].exp().to(x.dtype)[..., None, None]
    before, last = decay_scan(added, whole, state, starts)
    carried = (c @ before.flatten(3, 4).mT).unflatten(-1, (-1, width)).transpose(3, 4)
    out = out + carried * total.exp().to(x.dtype)[..., None]
    return out.flatten(2, 3).transpose(2, 3), last
