"""Mixer kinds by name: our own, found by importing this package, and other packages' entry points."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from .base import LayerError, Mixer

ENTRY_POINT_GROUP = "hybrid.layers"

_kinds: dict[str, type[Mixer]] = {}


def register(kind: str):
    """Class decorator: make a mixer known as `kind`. Its `Options` must be a dataclass."""

    def add(mixer: type[Mixer]) -> type[Mixer]:
        assert dataclasses.is_dataclass(mixer.Options), f"{mixer.__name__}.Options must be a dataclass"
        other = _kinds.get(kind)
        if other is not None and other.__qualname__ != mixer.__qualname__:
            raise LayerError(
                f"two mixers are registered as '{kind}': {other.__module__} and {mixer.__module__}"
            )
        mixer.kind = kind
        _kinds[kind] = mixer
        return mixer

    return add


@cache
def _discover() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        importlib.import_module(module.name)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        mixer = point.load()
        if point.name not in _kinds:
            register(point.name)(mixer)


def kinds() -> dict[str, type[Mixer]]:
    """All known kinds, sorted by name."""
    _discover()
    return dict(sorted(_kinds.items()))


def mixer_class(kind: str) -> type[Mixer]:
    """The mixer registered as `kind`; LayerError names the nearest known one otherwise."""
    known = kinds()
    if kind in known:
        return known[kind]
    near = difflib.get_close_matches(str(kind), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise LayerError(f"unknown layer kind '{kind}'{hint} Known kinds: {', '.join(known)}")
