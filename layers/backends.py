"""What computes: the switch to plain torch for every layer, and kernels of packages that may be installed."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .errors import SlowPathWarning

_plain: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def force_plain(on: bool = True) -> Iterator[None]:
    """Compute with torch's plain operators in every layer inside this context, and later in its backward."""
    token = _plain.set(on)
    try:
        yield
    finally:
        _plain.reset(token)


def plain_forced() -> bool:
    """Whether `force_plain` is in effect here."""
    return _plain.get()


@cache
def load_kernels(
    package: str, module: str, *functions: str, needs: tuple[str, ...] = ()
) -> tuple[Callable[..., Any], ...] | None:
    """Import functions of `module` on first use; None where `package`, or what it is in, or one of the
    packages that it `needs`, is not installed.

    A broken installation gives None too, and is told once.
    """
    try:
        found = importlib.import_module(module)
        return tuple(getattr(found, function) for function in functions)
    except ModuleNotFoundError as error:
        if f"{package}.".startswith(f"{error.name}.") or str(error.name).partition(".")[0] in needs:
            return None
        problem: Exception = error
    except Exception as error:  # Triton, missing drivers and half-installed packages fail in many ways
        problem = error
    name = f"{module}:{', '.join(functions)}"
    warnings.warn(f"{name} cannot be loaded ({problem}); another kernel computes instead", SlowPathWarning, 2)
    return None


@contextmanager
def full_precision(like: Tensor) -> Iterator[None]:
    """Multiply fp32 matrices on a GPU without TF32 inside this context, whose 10 bits are too few for what
    decays are factored into, and for choices between products. Elsewhere nothing else happens anyway."""
    if like.device.type != "cuda":
        yield
        return
    # Not `allow_tf32`, which cannot be read any more where anybody has used the newer setting.
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
