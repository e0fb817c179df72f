"""Text from files and command lines -> typed values, by the type a key is declared with.

Nothing is evaluated. A number is what looks like one *and* is wanted by the key: `1e-4` becomes a float where
one is wanted and stays text where text is.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from .schema import MISSING

_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_NUMBER = re.compile(r"[+-]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")  # of a JSON escape, or of bytes typed that are not UTF-8
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def looks_typed(text: str) -> bool:
    """Whether a YAML reader might take this text for a number, a truth value or nothing."""
    return bool(_NUMBER.fullmatch(text)) or text.lower() in {*_WORDS, "null", "~", "", "y", "n"}


def coerce(value: Any, kind: Any) -> Any:
    """Convert `value` to the annotated type `kind`; a ValueError says what was expected, without the key."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return members[1](coerce(value, members[0]))
    if value == MISSING:
        raise ValueError(f"needs a value: {describe(kind)}")
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, kind, members)
    if value is None:
        raise ValueError(f"needs a value: {describe(kind)}")
    if origin in (list, tuple, Sequence):
        return _coerce_list(value, kind, members or (Any,))
    text = value if isinstance(value, str) else repr(value)  # a recipe made in code holds typed values
    if origin is Literal:
        for choice in members:
            if text == str(choice):
                return choice
    elif kind is bool and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    elif kind is int and len(text) < 400 and _WHOLE.fullmatch(text):
        if abs(int(text)) < 2**63:
            return int(text)
        raise ValueError(f"expected a whole number below 2^63, found {shown(value)}")
    elif kind is float and _NUMBER.fullmatch(text):
        if math.isfinite(float(text)):
            return float(text)
        raise ValueError(f"expected a finite number, found {shown(value)}")
    elif kind is str and isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        raise ValueError(f"expected text in valid Unicode, found {shown(value)}")
    elif kind not in _NAMES:
        raise ValueError(f"cannot be set from a recipe (its type is {kind})")
    raise ValueError(f"expected {describe(kind)}, found {shown(value)}")


def _coerce_union(value: Any, kind: Any, members: tuple[Any, ...]) -> Any:
    if value is None and type(None) in members:
        return None
    others = [member for member in members if member is not type(None)]
    if len(others) == 1:
        return coerce(value, others[0])
    for member in others:
        with suppress(ValueError):
            return coerce(value, member)
    raise ValueError(f"expected {describe(kind)}, found {shown(value)}")


def _coerce_list(value: Any, kind: Any, members: tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected {describe(kind)}, found {shown(value)}; write [a, b]")
    if typing.get_origin(kind) is not tuple:
        return [coerce(item, members[0]) for item in value]
    kinds = [members[0]] * len(value) if members[-1] is ... else members
    if len(value) != len(kinds):
        raise ValueError(f"expected {len(kinds)} values, found {len(value)}")
    return tuple(map(coerce, value, kinds))


def describe(kind: Any) -> str:
    """Describe a type in words."""
    kind = _bare(kind)
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, members))
    if origin is Literal:
        return "one of " + ", ".join(map(str, members))
    if origin in (list, tuple, Sequence):
        return f"a list of {_PLURALS.get(_bare(next(iter(members), Any)), 'values')}"
    return _NAMES.get(kind, str(kind))


def _bare(kind: Any) -> Any:
    """Take the check of an annotated type away."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


def shown(value: Any) -> str:
    """Repeat a value as people wrote it, shortened."""
    if isinstance(value, dict | list | tuple):
        return "a table" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
