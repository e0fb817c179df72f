"""What layers refuse, and how they say it. Light: nothing here imports torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any


class UserError(ValueError):
    """A mistake in what was asked or in what was found; the message says what, where and what to do."""

    exit_code = 2


class LayerError(UserError):
    """Options or inputs that a layer cannot take; the message names them and what is allowed."""


class SlowPathWarning(UserWarning):
    """What is computed is exact, but slower than it might be; the message says why."""


def require(condition: bool, option: str, value: Any, allowed: str) -> None:
    """Raise LayerError naming the option, its value and what is allowed, unless `condition` holds."""
    if not condition:
        raise LayerError(f"{option} is {value!r}; allowed: {allowed}")


def is_count(value: Any, least: int = 1) -> bool:
    """Whether `value` is a whole number (not a bool) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether `value` is a number (not a bool)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_counts(options: Any, *names: str, least: int = 1, nullable: bool = False) -> None:
    """Raise LayerError unless each named option is a whole number from `least` on, or None if `nullable`."""
    allowed = f"a whole number of {least} or more" + (", or null" if nullable else "")
    for name in names:
        value = getattr(options, name)
        require((nullable and value is None) or is_count(value, least), name, value, allowed)


def require_flags(options: Any, *names: str) -> None:
    """Raise LayerError unless each named option is a bool."""
    for name in names:
        value = getattr(options, name)
        require(isinstance(value, bool), name, value, "true, false")


def require_positive(options: Any, name: str) -> None:
    """Raise LayerError unless the named option is a finite number above 0."""
    value = getattr(options, name)
    require(is_number(value) and 0 < value < math.inf, name, value, "a number above 0")


def shown(value: Any) -> str:
    """Describe what was given in a few words: a tensor by dtype and shape, else its type."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def did_you_mean(
    name: object, known: Iterable[str], cutoff: float = 0.6, shown: Mapping[str, str] | None = None
) -> str:
    """Suggest the known name nearest to a mistyped one: "; did you mean NAME?", or nothing.

    `shown` may give known names a longer form, such as a whole path.
    """
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {(shown or {}).get(near[0], near[0])}?" if near else ""
