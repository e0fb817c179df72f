"""Every built-in mixer's stepwise twin, for tests that hold for all kinds."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.layers import Mixer

from . import attention_reference, kvm_reference, ovq_reference, rwkv7_reference
from .linear_reference import State, delta_layer, mamba2_layer


def stepwise(mixer: Mixer, x: Tensor) -> Tensor:
    """What `mixer`, the first layer of its kind, makes of `x` `[B, T, C]` from the start, written from the
    definitions alone. A kind from elsewhere has no such twin here: it is called with one token at a time."""
    p = dict(mixer.named_parameters())
    if mixer.kind in ("full", "sliding_window", "block_window"):
        return attention_reference.mix(mixer, x)
    if mixer.kind == "kvm":
        return kvm_layer(mixer, x)[0]
    if mixer.kind == "ovq":
        q, k, v = ovq_reference.project(x, p, mixer.num_heads, None)
        found = ovq_reference.reference(q, k, v, mixer.options.chunk, mixer.options.max_centroids)
        return found.y.flatten(-2) @ p["c_proj.weight"].T
    if mixer.kind == "rwkv7":
        return rwkv7_reference.reference(x, p, mixer.num_heads).y
    if mixer.kind in ("gated_deltanet", "kimi_delta", "mamba2"):
        return linear_layer(mixer, x)[0]
    outputs, state = [], None
    for token in x.split(1, 1):
        y, state = mixer(token, None, state)
        outputs.append(y)
    return torch.cat(outputs, 1)


def kvm_layer(mixer: Any, x: Tensor) -> tuple[Tensor, kvm_reference.Reference]:
    """A KVM layer: output and the operator's twin."""
    q, k, v = attention_reference.project(mixer, x)
    p = dict(mixer.named_parameters())
    gate = None
    if "merge_gate.weight" in p:
        gate = 1 + F.elu(x @ p["merge_gate.weight"].t())
    norm = p["ln_s_k.weight"], p["ln_s_k.bias"]
    of_heads = p.get("front_head_temp"), p.get("state_head_temp"), p.get("state_head_bias")
    twin = kvm_reference.reference(q, k, v, gate, mixer.spec, *norm, *of_heads)
    return twin.y.flatten(2) @ p["c_proj.weight"].t(), twin


def linear_layer(mixer: Any, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
    """Gated DeltaNet, Kimi Delta Attention or Mamba-2: output and the next state by field name."""
    weights, options = dict(mixer.named_parameters()), mixer.options
    if mixer.kind == "mamba2":
        return mamba2_layer(weights, options, x, state)
    options = type(options)(**{**vars(options), **mixer.heads(options, x.shape[-1])._asdict()})
    return delta_layer(mixer.kind, weights, options, x, state)
