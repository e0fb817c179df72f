"""Token mixers: tensors in, tensors out. Any of them works alone, in any trainer:

    from hybrid.layers import Site, mixer_class

    KVM = mixer_class("kvm")
    layer = KVM(KVM.Options(num_heads=8, head_dim=64, chunk=128), Site(hidden_size=512))
    y, state = layer(x)                   # x [B, T, 512]; state lets the next call go on
    y, state = layer(more, None, state)

The names below are what users of layers and authors of new ones need: `base.py` is the contract, `context.py`
what a call knows beside x, `registry.py` finds mixers by kind. Nothing here imports the rest of `hybrid`.
They are imported when first used, so that `hybrid.layers.errors` costs no import of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import LayerError, UserError, require

if TYPE_CHECKING:
    from .base import Flops, Mixer, Site
    from .context import Context
    from .parameters import initialise
    from .registry import kinds, mixer_class, register
    from .state import MixerState

_MODULES = {
    "Context": "context",
    "Flops": "base",
    "Mixer": "base",
    "MixerState": "state",
    "Site": "base",
    "initialise": "parameters",
    "kinds": "registry",
    "mixer_class": "registry",
    "register": "registry",
}

__all__ = [
    "Context",
    "Flops",
    "LayerError",
    "Mixer",
    "MixerState",
    "Site",
    "UserError",
    "initialise",
    "kinds",
    "mixer_class",
    "register",
    "require",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
