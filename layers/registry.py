"""Mixer kinds by name: our own, found by importing this package, and other packages' entry points."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from .base import Mixer
from .errors import LayerError, did_you_mean

ENTRY_POINT_GROUP = "hybrid.layers"

_kinds: dict[str, type[Mixer]] = {}
_broken: dict[str, LayerError] = {}
"""Kinds of other packages that cannot be loaded: the error to raise for who asks for them."""


def register(kind: str):
    """Make a mixer known as `kind` (class decorator). Its `Options` must be a dataclass."""

    def add(mixer: type[Mixer]) -> type[Mixer]:
        if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
            raise LayerError(f"{mixer} is no Mixer; an entry point names its class as 'module:Class'")
        other = _kinds.get(kind)
        if other is not None and _origin(other) != _origin(mixer):
            raise LayerError(f"two mixers are registered as '{kind}': {_origin(other)} and {_origin(mixer)}")
        if not dataclasses.is_dataclass(getattr(mixer, "Options", None)):
            raise LayerError(f"mixer '{kind}': {_origin(mixer)}.Options must be a dataclass")
        mixer.kind = kind
        _kinds[kind] = mixer
        return mixer

    return add


def _origin(mixer: type[Mixer]) -> str:
    return f"{mixer.__module__}.{mixer.__qualname__}"


@cache
def _discover() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.walk_packages(package.__path__, f"{__package__}."):
        importlib.import_module(module.name)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            register(point.name)(point.load())
        except Exception as error:  # whatever importing another package's module may raise
            owner = f" of package {point.dist.name}" if point.dist else ""
            _broken[point.name] = LayerError(
                f"layer kind '{point.name}' ({point.value}{owner}) cannot be loaded: {error}"
            )


def kinds() -> dict[str, type[Mixer]]:
    """List all known kinds, sorted by name."""
    _discover()
    return dict(sorted(_kinds.items()))


def mixer_class(kind: str) -> type[Mixer]:
    """Find the mixer registered as `kind`; raise LayerError, which names the nearest known one, otherwise."""
    known = kinds()
    if kind in _broken:
        raise _broken[kind]
    if kind in known:
        return known[kind]
    hint = did_you_mean(kind, known)
    raise LayerError(f"unknown layer kind '{kind}'{hint or ';'} known kinds: {', '.join(known)}")
