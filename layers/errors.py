"""What layers refuse, and how they say it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class LayerError(ValueError):
    """Options or inputs that a layer cannot take; the message names them and what is allowed."""


def require(condition: bool, option: str, value: Any, allowed: str) -> None:
    """LayerError naming the option, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise LayerError(f"{option} is {value!r}; allowed: {allowed}")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether `value` is a whole number (not a bool) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def shown(value: Any) -> str:
    """What was given, in a few words."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
