"""Calls of flash-linear-attention's kernels; the only place that knows whether they can run.

Its functions take `[B, T, H, D]`, packed documents as int64 `cu_seqlens` on the device, an fp32 state
`[N, H, K, V]`, and must be called by keyword (their argument orders differ). Their chunked forms are for
training and prompts, the recurrent ones for short calls without gradients, as they have no backward. What the
chunked ones make of `cu_seqlens` they keep by the tensor itself, and read a copy on the host for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import load_kernels, plain_forced
from ..indices import borders

MAX_KEY_WIDTH = 256
SHORT = 64  # tokens; shorter calls without gradients run the recurrent kernel


def fla_kernel(name: str, x: Tensor, key_width: int, dtype: torch.dtype, **bounds: Any) -> Callable | None:
    """Find fla's kernel for inputs like `x` `[B, T, ...]`, computed in `dtype`; None where torch has to
    compute.

    None means: not 16-bit floats on a CUDA device of at least Ampere's generation, key heads wider than 256,
    fla missing or not importable, or torch forced by `force_plain`.

    Args:
        name: `module:function`; in both `{}` stands for the form, chunk or fused_recurrent.
        bounds: what the chunked form takes beside, which says how fast decays are.

    Returns:
        A function of the arguments of `_run` after `dtype`.
    """
    if plain_forced() or not on_supported_gpu(x.device, dtype) or key_width > MAX_KEY_WIDTH:
        return None
    form = "fused_recurrent" if x.shape[1] < SHORT and not torch.is_grad_enabled() else "chunk"
    found = load_kernels("fla", *name.replace("{}", form).split(":"))
    return None if found is None else partial(_run, found[0], dtype, bounds if form == "chunk" else None)


def fla_short_conv(
    u: Tensor, weight: Tensor, bias: Tensor | None, last: Tensor | None, lengths: Sequence[int]
) -> tuple[Tensor, Tensor | None] | None:
    """Convolve `u` `[B, T, channels]` as `ShortConv.forward` does, SiLU included, by fla's kernel: the
    outputs in u's dtype, and the last inputs (None of packed rows). None where torch has to compute."""
    wanted = u.shape[1] >= SHORT and not (lengths and last is not None)
    if plain_forced() or not wanted or not on_supported_gpu(u.device, u.dtype):
        return None
    found = load_kernels("fla", "fla.modules.causal_conv1d", "causal_conv1d")
    if found is None:
        return None
    return found[0](
        x=u, weight=weight.squeeze(1), bias=bias, initial_state=last, output_final_state=not lengths,
        activation="silu", **_packed(lengths, u.device),
    )  # fmt: skip


def _packed(lengths: Sequence[int], device: torch.device) -> dict[str, Tensor | None]:
    """Give packed documents' borders as the chunked forms take them: the same tensors for one batch."""
    if not lengths:
        return {"cu_seqlens": None}
    here, there = (borders(tuple(lengths), where) for where in (torch.device("cpu"), device))
    return {"cu_seqlens": there, "cu_seqlens_cpu": here}


def on_supported_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels can run: half precision, Ampere or newer."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False  # fp32 stays exact: the kernels would round it
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _run(
    kernel: Callable,
    dtype: torch.dtype,
    bounds: dict[str, Any] | None,
    operands: dict[str, Tensor],
    decay: dict[str, Tensor],
    scale: float,
    state: Tensor | None,
    lengths: Sequence[int],
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Run `kernel` on operands by its names, cast to `dtype`, and the log decay as it is; `bounds`: None for
    the recurrent form; `more`: what all forms take beside.

    Returns:
        The outputs, and the state after the (packed: the last document's) last token.
    """
    packed = _packed(lengths, next(iter(decay.values())).device)
    if bounds is None:
        packed.pop("cu_seqlens_cpu", None)
    cast = {name: x.to(dtype) for name, x in operands.items()}
    o, states = kernel(
        **cast,
        **decay,
        scale=scale,
        initial_state=state,
        output_final_state=True,
        **packed,
        **bounds or {},
        **more,
    )
    return o, states[-1:] if lengths else states
