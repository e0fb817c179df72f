"""Make transformers and peft know our models when they are imported, without importing them ourselves."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

REGISTERING = {
    "transformers.models.auto.configuration_auto": "hybrid.convert.hf.configuration",
    "transformers.models.auto.modeling_auto": "hybrid.convert.hf.modeling",
    "peft.utils.constants": "hybrid.convert.hf.peft_targets",
}
"""Module of another package -> ours, whose `register()` is called once that module is imported."""


class _Finder(MetaPathFinder):
    """Find the modules of REGISTERING where Python does, and register our models behind their import."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in REGISTERING else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register our models with what is imported already, and with the rest when it is. Costs nothing else."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name in REGISTERING:
            if name in sys.modules:
                _register(name)


def _register(name: str) -> None:
    try:
        import_module(REGISTERING[name]).register()
    except ImportError as error:  # a version without what we need must still work for other models
        warnings.warn(f"models of kvm-hybrid are not known to {name}: {error}", stacklevel=2)
