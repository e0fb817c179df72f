"""Text from files and command lines -> typed values, by the type a field is declared with.

Nothing is evaluated. A number is what looks like one *and* is wanted by the field: `1e-4` is a float for a
float field and stays text for a text field.
"""

from __future__ import annotations

import math
import re
import types
import typing
from typing import Any

_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_NUMBER = re.compile(r"[+-]?([0-9]+(_[0-9]+)*(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def looks_typed(text: str) -> bool:
    """Whether a YAML reader might take this text for a number, a truth value or nothing."""
    return bool(_NUMBER.fullmatch(text)) or text.lower() in {*_WORDS, "null", "~", "", "y", "n"}


def coerce(value: Any, kind: Any) -> Any:
    """`value` as the annotated type `kind`; a ValueError says what was expected, without the place."""
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, kind)
    if value is None:
        raise ValueError(f"needs a value: {describe(kind)}")
    if origin is typing.Literal:
        for choice in typing.get_args(kind):
            if value == choice or value == str(choice):
                return choice
    elif origin in (list, tuple, typing.get_origin(typing.Sequence[int])):
        return _coerce_list(value, kind, origin)
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and len(value) < 30 and _WHOLE.fullmatch(value):
            return _storable(int(value))
    elif kind is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _finite(float(value))
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            return _finite(float(value))
    elif kind is str:
        if isinstance(value, str):
            return _unicode(value)
    else:
        raise ValueError(f"cannot be set from a recipe (its type is {kind})")
    raise ValueError(f"expected {describe(kind)}, found {shown(value)}")


def _finite(value: float) -> float:
    if math.isfinite(value):
        return value
    raise ValueError(f"expected a finite number, found {value}")


def _storable(value: int) -> int:
    if abs(value) < 2**63:
        return value
    raise ValueError(f"expected a whole number below 2^63, found {value}")


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a JSON escape, or bytes of the command line that are not UTF-8
        raise ValueError(f"expected text in valid Unicode, found {shown(text)}") from None
    return text


def _coerce_union(value: Any, kind: Any) -> Any:
    members = typing.get_args(kind)
    if value is None and type(None) in members:
        return None
    others = [member for member in members if member is not type(None)]
    for member in others:
        try:
            return coerce(value, member)
        except ValueError as error:
            if len(others) == 1:
                raise ValueError(str(error)) from None
    raise ValueError(f"expected {describe(kind)}, found {shown(value)}")


def _coerce_list(value: Any, kind: Any, origin: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected {describe(kind)}, found {shown(value)}; write [a, b]")
    member, *rest = typing.get_args(kind) or (Any,)
    if origin is tuple and rest != [...] and len(value) != 1 + len(rest):
        raise ValueError(f"expected {1 + len(rest)} values, found {len(value)}")
    fixed = origin is tuple and rest and rest != [...]
    kinds: list[Any] = [member, *rest] if fixed else [member] * len(value)
    items = [coerce(item, item_kind) for item, item_kind in zip(value, kinds, strict=True)]
    return tuple(items) if origin is tuple else items


def describe(kind: Any) -> str:
    """A type in words."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if member is type(None) else describe(member) for member in members)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, members))
    if origin in (list, tuple):
        return "a list of " + {int: "whole numbers", float: "numbers", str: "texts"}.get(members[0], "values")
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}
    return names.get(kind, str(kind))


def shown(value: Any) -> str:
    """A value as people wrote it, shortened."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
