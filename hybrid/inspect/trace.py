"""Read a text through a model and note what its KVM layers do with every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import UserError
from hybrid.layers.kvm.mixer import KVM, positive_gate
from hybrid.layers.kvm.routing import Routes
from hybrid.layers.kvm.state import KVMState
from hybrid.model import HybridLM

PIECE = 1024
"""Tokens read per call: bounds the memory that reading takes beside the state."""


class InspectError(UserError):
    """A text or model that cannot be shown; the message says why and what is allowed."""


@dataclass
class LayerTrace:
    """What one KVM layer did; a list has one entry for each call of the model, along the last axis."""

    mixer: KVM
    slots: list[np.ndarray] = field(default_factory=list)
    """int32 `[G, A]`: the slot of each token that is in the state, from token 0 on."""
    founds: list[np.ndarray] = field(default_factory=list)
    """bool `[G, A]`: whether the token made its slot."""
    gates: list[np.ndarray] = field(default_factory=list)
    """fp32 `[G, T]`, the merge gate; nothing where the layer has none."""
    masses: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """For each query token the attention `[G, S]` on slots and `[G, W]` on its window, the mean over the
    query heads that share a key/value head."""
    _query: Tensor | None = None

    def look(self, mixer: Any, arguments: tuple[Any, ...], query: bool) -> None:
        """Take what the layer is about to be called with."""
        x, context, state = arguments
        logits = self.mixer.gates(x, context)
        if logits is not None:
            self.gates.append(positive_gate(logits)[0].T.float().cpu().numpy())
        self._query = self.mixer.project(x, context, state).q if query else None

    def take(self, routes: Routes, state: KVMState) -> None:
        """Take what a call has made."""
        self.slots.append(routes.slot[0].cpu().numpy())
        self.founds.append(routes.founds[0].cpu().numpy())
        if self._query is not None:
            shared = (self.mixer.num_kv_heads, -1)
            found = (x[0].unflatten(0, shared).mean(1).cpu() for x in self.mixer.masses(self._query, state))
            slots, window = (x.float().numpy() for x in found)
            self.masses.append((slots, window))


@torch.no_grad()
def trace(
    model: HybridLM,
    ids: Tensor,
    mixers: Sequence[KVM],
    queries: Sequence[int],
    say: Callable[[str], None] = lambda text: None,
) -> list[LayerTrace]:
    """Read a text in pieces through the model's state.

    Args:
        ids: int64 `[T]`, on the model's device.
        mixers: the model's KVM layers to look at.
        queries: positions of the tokens whose attention is wanted; each is read in a call of its own.
        say: told how far it is.

    Raises InspectError when the model gives what is not finite.
    """
    traces = [LayerTrace(mixer) for mixer in mixers]
    count, wanted = len(ids), set(queries)
    borders = sorted({*range(0, count, PIECE), *wanted, *(query + 1 for query in wanted), count})
    state: Any = None
    for start, end in pairwise(borders):
        say(f"read {start:,} of {count:,} tokens")
        routes: dict[int, Any] = {}
        hooks = [
            one.mixer.register_forward_pre_hook(
                lambda mixer, given, one=one, query=start in wanted: one.look(mixer, given, query)
            )
            for one in traces
        ]
        try:
            logits, state = model(ids[None, start:end], state, routes=routes, last_only=True)
        finally:
            for hook in hooks:
                hook.remove()
        if not torch.isfinite(logits).all():
            raise InspectError(
                f"the model's logits are not finite after {end:,} tokens; its weights are probably from a "
                "run that diverged"
            )
        for one in traces:
            layer = one.mixer.site.layer
            one.take(routes[layer], state.layers[layer].mixer.operator)
    return traces
