"""The one switch between fast kernels and plain torch, for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_plain: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def force_plain(on: bool = True) -> Iterator[None]:
    """Inside this context every layer, and later its backward, computes with torch's plain operators."""
    token = _plain.set(on)
    try:
        yield
    finally:
        _plain.reset(token)


def plain_forced() -> bool:
    """Whether `force_plain` is in effect here."""
    return _plain.get()
