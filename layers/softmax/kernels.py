"""One block of attention, forward and backward: the only place that knows which kernel runs.

Shapes: q `[R, T, H, D]`, k and v `[R, S, G, D]` with T, S >= 1 and H a multiple of G (query head h reads
key/value head h // (H / G)); R is any number of independent blocks. Tensors may be strided views.

`backward` takes the output and log-sum-exp of the *whole* softmax, of which this block's keys may be only a
part; its gradients are then what this block adds to the whole gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..backends import plain_forced
from ..errors import LayerError, SlowPathWarning
from . import flash


class Mask(Enum):
    """Which keys j a query i of the block sees. LOWER and UPPER need T == S, so no query is without keys."""

    FULL = "all keys"
    LOWER = "j <= i"
    UPPER = "j >= i"


KERNELS = ("plain", "cpu", "cuda", *flash.MODULES)
"""Matrix products; torch's flash operators for CPU and for CUDA; the flash-attn packages."""
LARGEST_HEAD = 256
Tensors = tuple[Tensor, Tensor, Tensor]
_forced: ContextVar[str | None] = ContextVar("kernel", default=None)


@contextmanager
def force_kernel(name: str) -> Iterator[None]:
    """Run attention inside this context, and later in its backward, by this one of KERNELS or fail.

    `force_plain`, which is for all layers, goes before it.
    """
    if name not in KERNELS:
        raise LayerError(f"there is no attention kernel {name!r}; there are: {', '.join(KERNELS)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(q: Tensor) -> str:
    """Choose the kernel for queries `q`: one of KERNELS, the fastest that computes them."""
    forced = "plain" if plain_forced() else _forced.get()
    if forced is not None:
        return forced
    head_size = q.shape[-1]
    if q.device.type == "cpu":
        return "cpu" if head_size <= LARGEST_HEAD else _plain_head(head_size, "up to 256")
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return "plain"
    generation, _ = torch.cuda.get_device_capability(q.device)
    if generation < 8:
        return "plain"
    if head_size > LARGEST_HEAD or head_size % 8:
        return _plain_head(head_size, "multiples of 8 up to 256")
    return flash.fitting(head_size, generation, q.shape[1]) or "cuda"


@cache
def _plain_head(head_size: int, allowed: str) -> str:
    """Choose plain products, and warn (once, as it is cached)."""
    warnings.warn(
        f"heads of {head_size} features do not fit the fast attention kernels ({allowed} do): plain matrix "
        "products compute them, exactly but slowly",
        SlowPathWarning,
        stacklevel=4,
    )
    return "plain"


def forward(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Compute output `[R, T, H, D]` (q's dtype; at least fp32 from the plain kernel) and log-sum-exp `[R, H,
    T]` (at least fp32)."""
    _check(q, k, mask)
    if kernel in flash.MODULES and mask is not Mask.UPPER:
        q, k, v = (loadable(x) for x in (q, k, v))
        return flash.forward(kernel, q, k, v, mask is Mask.LOWER, scale)
    return _OWN[kernel][0](q, k, v, mask, scale)


def backward(
    kernel: str, joint: Tensors, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> Tensors:
    """Compute gradients of q, k and v; `grad` and `out` `[R, T, H, D]`, `lse` `[R, H, T]` of the whole
    softmax."""
    _check(q, k, mask)
    if kernel in flash.MODULES and mask is not Mask.UPPER:
        q, k, v = (loadable(x) for x in (q, k, v))
        return flash.backward(kernel, joint, q, k, v, mask is Mask.LOWER, scale)
    return _OWN[kernel][1](joint, q, k, v, mask, scale)


def _check(q: Tensor, k: Tensor, mask: Mask) -> None:
    # torch's CPU operator kills the process on empty queries or keys, and aligns a causal mask top-left.
    assert min(q.shape[1], k.shape[1]) > 0, "empty attention block"
    assert mask is Mask.FULL or q.shape[1] == k.shape[1], "a masked block is square"


def _hidden(mask: Mask, size: int, device: torch.device) -> Tensor:
    """Make the mask `[T, T]`, true where the key is not seen."""
    every = torch.ones(size, size, dtype=torch.bool, device=device)
    return every.triu(1) if mask is Mask.LOWER else every.tril(-1)


# Plain


def _scores(q: Tensor, k: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logits `[R, G, H/G, T, S]`, and q and k laid out for them, in at least fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q_RGMTD = q.to(wide).transpose(1, 2).unflatten(1, (k.shape[2], -1))
    k_RG1SD = k.to(wide).transpose(1, 2).unsqueeze(2)
    logits = q_RGMTD @ k_RG1SD.mT * scale
    if mask is not Mask.FULL:
        logits = logits.masked_fill(_hidden(mask, q.shape[1], q.device), -torch.inf)
    return logits, q_RGMTD, k_RG1SD


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    logits, _, _ = _scores(q, k, mask, scale)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse[..., None])
    out = weights @ v.to(weights.dtype).transpose(1, 2).unsqueeze(2)
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)


def _plain_backward(joint: Tensors, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensors:
    grad, out, lse = joint
    logits, q_RGMTD, k_RG1SD = _scores(q, k, mask, scale)
    heads = (k.shape[2], -1)
    weights = torch.exp(logits - lse.unflatten(1, heads)[..., None])
    grad_RGMTD = grad.to(weights.dtype).transpose(1, 2).unflatten(1, heads)
    delta = (grad_RGMTD * out.to(weights.dtype).transpose(1, 2).unflatten(1, heads)).sum(-1, keepdim=True)
    v_RG1SD = v.to(weights.dtype).transpose(1, 2).unsqueeze(2)
    d_logits = weights * (grad_RGMTD @ v_RG1SD.mT - delta) * scale
    dq = (d_logits @ k_RG1SD).flatten(1, 2).transpose(1, 2)
    dk = (d_logits.mT @ q_RGMTD).sum(2).transpose(1, 2)
    dv = (weights.mT @ grad_RGMTD).sum(2).transpose(1, 2)
    return dq, dk, dv


# torch's flash operator for CPU: heads come before tokens; fewer key/value heads are its own business.


def _cpu_mask(mask: Mask, q: Tensor) -> Tensor | None:
    if mask is not Mask.UPPER:
        return None
    hidden = _hidden(mask, q.shape[1], q.device)
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (_last_axis_dense(x).transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is Mask.LOWER, attn_mask=_cpu_mask(mask, q.transpose(1, 2)), scale=scale
    )
    return out.transpose(1, 2), lse


def _cpu_backward(joint: Tensors, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensors:
    grad, out, lse = joint
    attn_mask = _cpu_mask(mask, q)
    grad, q, k, v, out = (_last_axis_dense(x).transpose(1, 2) for x in (grad, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, mask is Mask.LOWER, attn_mask=attn_mask, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _last_axis_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# torch's flash operator for CUDA: tokens come before heads, the window is relative to the diagonal.


def loadable(x: Tensor) -> Tensor:
    """Copy a tensor whose vectors do not all begin at a multiple of 16 bytes, as many as kernels for CUDA
    load at a time: they look at the last stride at most, and a misaligned address ends the process."""
    steps = [step for step, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]
    odd = any(n * x.element_size() % 16 for n in (*steps, x.storage_offset()))
    return x.clone(memory_format=torch.contiguous_format) if odd or x.stride(-1) != 1 else x


def _cuda_window(mask: Mask) -> dict[str, int]:
    return {"window_size_left": 0, "window_size_right": -1} if mask is Mask.UPPER else {}


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (loadable(x) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, mask is Mask.LOWER, False,
        scale=scale, **_cuda_window(mask),
    )  # fmt: skip
    return out, lse


def _cuda_backward(joint: Tensors, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensors:
    grad, out, lse = joint
    grad, q, k, v, out = (loadable(x) for x in (grad, q, k, v, out))
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of a dropout there is none of
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[1], k.shape[1], 0.0, mask is Mask.LOWER,
        unused, unused, scale=scale, **_cuda_window(mask),
    )  # fmt: skip


_OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "plain": (_plain_forward, _plain_backward),
    "cpu": (_cpu_forward, _cpu_backward),
    "cuda": (_cuda_forward, _cuda_backward),
    # The masks that flash-attn does not know.
    **dict.fromkeys(flash.MODULES, (_cuda_forward, _cuda_backward)),
}
