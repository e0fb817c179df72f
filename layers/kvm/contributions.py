"""What tokens add to their slots: weighted keys, weighted values, radii (spec sections 3 and 4).

Shapes: R rows (chunks entering the state, ordered by update, then by sequence), G key/value heads, C tokens
of a chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import KVMSpec, Update

EPSILON = 1e-5
"""The epsilon of the LayerNorm of state keys."""
TINY = 1e-12
"""Vectors below this length are not brought to a length, and their length has no gradient."""


class Tokens(NamedTuple):
    """Keys and values `[B, T, G, D]`, and merge gates `[B, T, G]` (None: 1 everywhere)."""

    k: Tensor
    v: Tensor
    gate: Tensor | None

    def map(self, change: Callable[[Tensor], Any]) -> Tokens:
        return Tokens(change(self.k), change(self.v), None if self.gate is None else change(self.gate))

    def split(self, lengths: Sequence[int]) -> list[Tokens]:
        gates = [None] * len(lengths) if self.gate is None else self.gate.split(list(lengths), 1)
        parts = (x.split(list(lengths), 1) for x in (self.k, self.v))
        return [Tokens(*some) for some in zip(*parts, gates, strict=True)]


class Sums(NamedTuple):
    """Keys, values and radii (or counts) of slots, `[..., S, D]` twice and `[..., S, 1]`, in at least fp32;
    also what single tokens add to them."""

    keys: Tensor
    values: Tensor
    radius: Tensor


class Norm(NamedTuple):
    """The LayerNorm of state keys: weight and bias `[D]`, shared by heads."""

    weight: Tensor
    bias: Tensor

    def __call__(self, keys: Tensor) -> Tensor:
        return F.layer_norm(keys, self.weight.shape, self.weight, self.bias, EPSILON)


class Normed:
    """A LayerNorm of keys `[..., D]` with its backward."""

    def __init__(self, keys: Tensor, norm: Norm) -> None:
        self.keys, self.norm = keys, norm
        self.out, *self.moments = torch.native_layer_norm(keys, norm.weight.shape, *norm, EPSILON)

    def backward(self, grad: Tensor, d_norm: Norm) -> Tensor:
        """Return the gradient of the keys; add to the norm's."""
        shape = self.norm.weight.shape
        d_keys, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
            grad, self.keys, shape, *self.moments, *self.norm, [True] * 3
        )
        d_norm.weight.add_(d_weight)
        d_norm.bias.add_(d_bias)
        return d_keys


def prepare(keys: Tensor, rotary_dim: int, norm: Norm) -> Tensor:
    """Normalise keys as they enter the state: `LN([0] * rotary_dim ++ k[rotary_dim:])`, spec section 3."""
    return norm(_unrotated(keys, rotary_dim, norm))


def _unrotated(keys: Tensor, rotary_dim: int, norm: Norm) -> Tensor:
    return F.pad(keys[..., rotary_dim:].to(norm.weight.dtype), (rotary_dim, 0))


class Weights(NamedTuple):
    """Factors `[R, G, C]` of a token's prepared key, of its value (None: 1 everywhere), and of its value's
    length, which gives its radius (None: no token has one)."""

    keys: Tensor | None
    values: Tensor | None
    radius: Tensor | None


def weights(founds: Tensor, gate: Tensor | None, updates: Sequence[Update], spec: KVMSpec) -> Weights:
    """Weigh tokens that enter in `updates`, those of update 0 first; `founds` and `gate` are `[R, G, C]`."""
    initial = updates[0].sequences if updates and updates[0].number == 0 else 0
    appends = any(update.after > update.before for update in updates)
    first = gate if spec.gate_initial else None
    merged = gate if gate is None or spec.gate_appends or not appends else torch.where(founds, 1, gate)

    def joined(first: Tensor | None, later: Tensor | None) -> Tensor | None:
        """Take the rows of update 0 from one, the others from the other."""
        if initial in (0, len(founds)) or gate is None or first is later:
            return first if initial else later
        first, later = (torch.ones_like(gate) if x is None else x for x in (first, later))
        return torch.cat((first[:initial], later[initial:]))

    radius = None
    if spec.values == "radius" and appends:  # merges leave it alone; at first it is the ungated value's
        appended = joined(None, gate if spec.gate_values and spec.gate_appends else None)
        radius = founds if appended is None else founds * appended
    by_keys = joined(first, merged if spec.gate_keys else None)
    return Weights(by_keys, joined(first, merged if spec.gate_values else None), radius)


def contributions(keys: Tensor, values: Tensor, weight: Weights, spec: KVMSpec) -> Sums:
    """Compute what every token adds to its slot, from prepared keys and values `[R, G, C, D]`."""
    values = values.to(keys.dtype)
    if weight.radius is not None:
        radius = torch.linalg.vector_norm(values, dim=-1, keepdim=True) * weight.radius[..., None]
    else:
        radius = torch.full_like(values[..., :1], 0.0 if spec.values == "radius" else 1.0)
    by_keys, by_values = weight.keys, weight.values
    keys = keys if by_keys is None else keys * by_keys[..., None]
    return Sums(keys, values if by_values is None else values * by_values[..., None], radius)


class Entered:
    """The contributions of the tokens of a group of updates, with their backward."""

    def __init__(
        self, tokens: Tokens, founds: Tensor, updates: Sequence[Update], spec: KVMSpec, norm: Norm
    ) -> None:
        """`tokens` `[R, C, G, D]`, as in the window; `founds` `[R, G, C]`."""
        self.rotary_dim = spec.rotary_dim
        self.prepared = Normed(_unrotated(tokens.k, spec.rotary_dim, norm), norm)
        self.keys = self.prepared.out.transpose(1, 2)
        self.values = tokens.v.to(norm.weight.dtype).transpose(1, 2)
        # The weights are small: autograd takes their gradients to the gate.
        self.gate = None if tokens.gate is None else tokens.gate.detach().transpose(1, 2).requires_grad_()
        with torch.enable_grad():
            self.weights = weights(founds, self.gate, updates, spec)
        detached = Weights(*(None if w is None else w.detach() for w in self.weights))
        self.sums = contributions(self.keys, self.values, detached, spec)

    def backward(self, d_sums: Sums, d_norm: Norm) -> Tokens:
        """Return gradients of `k` without its rotary features, `v` and `gate`, given those of `sums`."""
        weight = self.weights
        d_keys, d_values, d_radius = d_sums
        pairs: list[tuple[Tensor, Tensor]] = []  # weights and their gradients
        if weight.keys is not None:
            pairs.append((weight.keys, torch.linalg.vecdot(d_keys, self.keys)))
            d_keys = d_keys * weight.keys.detach()[..., None]
        if weight.values is not None:
            pairs.append((weight.values, torch.linalg.vecdot(d_values, self.values)))
            d_values = d_values * weight.values.detach()[..., None]
        if weight.radius is not None:
            length = torch.linalg.vector_norm(self.values, dim=-1, keepdim=True)
            pairs.append((weight.radius, (d_radius * length)[..., 0]))
            along = d_radius * weight.radius.detach()[..., None] / length.clamp_min(TINY)
            d_values = torch.addcmul(d_values, self.values, along * (length >= TINY))
        d_k = self.prepared.backward(d_keys.transpose(1, 2), d_norm)[..., self.rotary_dim :]
        return Tokens(d_k, d_values.transpose(1, 2), self._gate_gradient(pairs))

    def _gate_gradient(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        found = [(weight, grad) for weight, grad in pairs if weight.requires_grad]
        if not found or self.gate is None:
            return None
        (d_gate,) = torch.autograd.grad([w for w, _ in found], [self.gate], [grad for _, grad in found])
        return d_gate.transpose(1, 2)
