"""Token mixers: tensors in, tensors out. Any of them works alone, in any trainer:

    from hybrid.layers import Site, mixer_class

    KVM = mixer_class("kvm")
    layer = KVM(KVM.Options(num_heads=8, head_dim=64, chunk=128), Site(hidden_size=512))
    y, state = layer(x)                   # x [B, T, 512]; state lets the next call go on
    y, state = layer(more, None, state)

The names below are what users of layers and authors of new ones need: `base.py` is the contract, `context.py`
what a call knows beside x, `registry.py` finds mixers by kind. Nothing here imports the rest of `hybrid`.
"""

from .base import Flops, Mixer, Site
from .context import Context
from .errors import LayerError, UserError, require
from .parameters import initialise
from .registry import kinds, mixer_class, register
from .state import MixerState

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
