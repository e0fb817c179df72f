"""Where flash-linear-attention's kernels are found; the only place that knows whether they can run.

Its functions take `[B, T, H, D]`, packed documents as int64 `cu_seqlens` on the device, an fp32 state
`[N, H, K, V]`, and must be called by keyword (their argument orders differ). Their chunked forms are for
training and prompts, the recurrent ones for short calls without gradients.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ..plain import plain_forced

MAX_KEY_WIDTH = 256
SHORT = 64  # tokens; shorter calls without gradients run the recurrent kernel


def fla_function(name: str, like: Tensor, key_width: int) -> Callable | None:
    """The function `module:function` of fla to run for inputs as `like`; None where torch has to compute.

    None means: not 16-bit floats on a CUDA device of at least Ampere's generation, key heads wider than 256,
    fla missing or not importable, or torch forced by `hybrid.layers.softmax.force_plain`.
    """
    if plain_forced() or not on_supported_gpu(like) or key_width > MAX_KEY_WIDTH:
        return None
    return _load(name)


def on_supported_gpu(x: Tensor) -> bool:
    """Whether the Triton kernels take `x` as it is: half precision, Ampere or newer."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return False  # fp32 stays exact: the kernels would round it
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


@cache
def _load(name: str) -> Callable | None:
    """Import on first use, as fla imports Triton; a broken installation is told once."""
    module, function = name.split(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name == "fla":
            return None
        problem: Exception = error
    except Exception as error:  # Triton and driver faults come as many types
        problem = error
    warnings.warn(f"{name} cannot be loaded ({problem}); plain torch computes instead", stacklevel=2)
    return None


def recurrent(tokens: int) -> bool:
    """Whether a call of so many tokens is for the recurrent kernel, which has no backward."""
    return tokens < SHORT and not torch.is_grad_enabled()


def borders(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """fla's `cu_seqlens` of packed documents; None for equal rows."""
    if not lengths:
        return None
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(device)
