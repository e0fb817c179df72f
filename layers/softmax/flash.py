"""The flash-attn packages as kernels of one block: version 2, and the newer one in the CuTe language.

Their inner functions are called, which take and return the log-sum-exp `[R, H, T]` (fp32): the backward of a
block needs that of the whole softmax. Names and orders are those of flash-attn 2.7 and later, and of
`flash_attn.cute` as flash-attn-4 has it (what flash-attn 2.8 ships under that name is older, and left alone).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import load_kernels

V2, CUTE = "flash_attn", "flash_attn_cute"
MODULES = {
    V2: ("flash_attn.flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward"),
    CUTE: ("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"),
}
NEEDS = {V2: (), CUTE: ("cutlass", "cuda", "quack", "tvm_ffi", "einops", "torch_c_dlpack_ext")}
"""Packages without which one of these is not installed, whatever else is."""
LARGEST_HEAD = {V2: 256, CUTE: 128}
GENERATIONS = {V2: range(8, 100), CUTE: range(9, 11)}
"""Compute capabilities (major) of GPUs."""


LONG = 1024
"""Queries of a block from which a call of a package is worth its time on the host (a quarter of a millisecond
forward and backward): torch's own operator is version 2 too, so that only the newer one gains anything."""


def fitting(head_size: int, generation: int, queries: int) -> str | None:
    """Find the installed package that is faster than torch's operator on a GPU of compute capability
    `generation`, for blocks of so many queries."""
    fits = head_size <= LARGEST_HEAD[CUTE] and generation in GENERATIONS[CUTE] and queries >= LONG
    return CUTE if fits and functions(CUTE) else None


def functions(name: str) -> tuple[Callable[..., Any], ...] | None:
    """Give the package's forward and backward; None where it is not installed, or is too old."""
    module, *wanted = MODULES[name]
    found = load_kernels(module, module, *wanted, needs=NEEDS[name])
    if found is None or name == V2:
        return found
    known = [inspect.signature(function).parameters for function in found]
    return found if "return_lse" in known[0] and "deterministic" in known[1] else None


def forward(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute output `[R, T, H, D]` and log-sum-exp `[R, H, T]`."""
    run, _ = _loaded(name)
    if name == V2:
        found = run(
            q, k, v, dropout_p=0.0, softmax_scale=scale, causal=causal, window_size_left=-1,
            window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
    else:
        found = run(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    return found[0], found[1]


def backward(
    name: str, joint: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of q, k and v; repeatable where torch's deterministic algorithms are asked for.

    `joint`: the output's gradient, the output, and the log-sum-exp, of the whole softmax.
    """
    _, run = _loaded(name)
    grad, out, lse = (x.contiguous() for x in joint)
    if name == CUTE:
        dq, dk, dv = run(
            q, k, v, out, grad, lse, softmax_scale=scale, causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )[:3]  # fmt: skip
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    run(
        grad, q, k, v, out, lse, dq, dk, dv, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv


def _loaded(name: str) -> tuple[Callable[..., Any], ...]:
    found = functions(name)
    if found is None:
        raise RuntimeError(f"{MODULES[name][0]} is not installed")
    return found
