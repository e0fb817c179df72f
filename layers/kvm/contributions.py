"""What tokens add to their slots: weighted keys, weighted values, radii (spec sections 3 and 4).

Shapes: R rows (chunks entering the state, ordered by update, then by sequence), G key/value heads, C tokens
of a chunk, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import KVMSpec, Update

EPSILON = 1e-5
"""Of the LayerNorm of state keys."""
TINY = 1e-12
"""Vectors below this length are not brought to a length, and their length has no gradient."""


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

    def backward(self, slope: Tensor, d_norm: Norm) -> Tensor:
        """The gradient of the keys; adds to the norm's."""
        shape = self.norm.weight.shape
        found, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
            slope, self.keys, shape, *self.moments, *self.norm, [True] * 3
        )
        d_norm.weight.add_(d_weight)
        d_norm.bias.add_(d_bias)
        return found


def prepare(keys: Tensor, rotary_dim: int, norm: Norm) -> Tensor:
    """Keys as they enter the state: `LN([0] * rotary_dim ++ k[rotary_dim:])`, spec section 3."""
    return norm(_unrotated(keys, rotary_dim, norm))


def _unrotated(keys: Tensor, rotary_dim: int, norm: Norm) -> Tensor:
    wide = keys[..., rotary_dim:].to(norm.weight.dtype)
    return F.pad(wide, (rotary_dim, 0)) if rotary_dim else wide


class Weights(NamedTuple):
    """What a token's prepared key and its value are multiplied by, each `[R, G, C]` or, for 1 everywhere,
    None; and what the length of its value is, for its radius (None: no token has one)."""

    keys: Tensor | None
    values: Tensor | None
    radius: Tensor | None


def weights(founds: Tensor, gate: Tensor | None, steps: Sequence[Update], spec: KVMSpec) -> Weights:
    """Of rows that enter in `steps`; `founds` and `gate` `[R, G, C]`."""
    initial = steps[0].sequences if steps[0].number == 0 else 0
    appends = any(step.after > step.before for step in steps)
    first = gate if spec.gate_initial else None
    merged = gate if gate is None or spec.gate_appends or not appends else torch.where(founds, 1, gate)

    def joined(first: Tensor | None, later: Tensor | None) -> Tensor | None:
        """Of the rows of update 0, and of the others."""
        if initial in (0, len(founds)):
            return first if initial else later
        if gate is None or first is later:
            return first
        first, later = (torch.ones_like(gate) if x is None else x for x in (first, later))
        return torch.cat((first[:initial], later[initial:]))

    radius = None
    if spec.values == "radius" and appends:
        # Merges leave the radius alone. The initial state's is that of the ungated value.
        length_weight = joined(None, gate if spec.gate_values and spec.gate_appends else None)
        radius = founds if length_weight is None else founds * length_weight
    return Weights(
        joined(first, merged if spec.gate_keys else None),
        joined(first, merged if spec.gate_values else None),
        radius,
    )


def contributions(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    founds: Tensor,
    steps: Sequence[Update],
    spec: KVMSpec,
) -> Sums:
    """What every token adds to its slot, `[R, G, C, ...]`, of prepared keys and values `[R, G, C, D]`.

    Differentiable.
    """
    return _weighted(keys, values.to(keys.dtype), weights(founds, gate, steps, spec), spec)


def _weighted(keys: Tensor, values: Tensor, weight: Weights, spec: KVMSpec) -> Sums:
    added_keys, added_values = (
        x if w is None else x * w[..., None] for x, w in zip((keys, values), weight[:2], strict=True)
    )
    if weight.radius is not None:
        radius = torch.linalg.vector_norm(values, dim=-1, keepdim=True) * weight.radius[..., None]
    else:
        radius = torch.full_like(values[..., :1], 0.0 if spec.values == "radius" else 1.0)
    return Sums(added_keys, added_values, radius)


class Entered:
    """The contributions of tokens, with their backward; what a group of updates takes in."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        gate: Tensor | None,
        founds: Tensor,
        steps: Sequence[Update],
        spec: KVMSpec,
        norm: Norm,
    ) -> None:
        """`k` and `v` `[R, C, G, D]`, as in the window; `gate` `[R, C, G]`; `founds` `[R, G, C]`."""
        self.rotary_dim = spec.rotary_dim
        self.prepared = Normed(_unrotated(k, spec.rotary_dim, norm), norm)
        self.values = v.to(norm.weight.dtype)
        # The weights are small: autograd takes their gradients to the gate.
        self.gate = None if gate is None else gate.detach().transpose(1, 2).requires_grad_()
        with torch.enable_grad():
            self.weights = weights(founds, self.gate, steps, spec)
        detached = Weights(*(None if w is None else w.detach() for w in self.weights))
        keys, values = (x.transpose(1, 2) for x in (self.prepared.out, self.values))
        self.sums = _weighted(keys, values, detached, spec)

    def backward(self, slopes: Sums, d_norm: Norm) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of `k` without its rotary features, of `v` and of `gate`, given those of `sums`."""
        weight = self.weights
        keys, values = (x.transpose(1, 2) for x in (self.prepared.out, self.values))
        to_keys, to_values, to_radius = slopes
        pairs: list[tuple[Tensor, Tensor]] = []
        if weight.keys is not None:
            pairs.append((weight.keys, torch.linalg.vecdot(to_keys, keys)))
            to_keys = to_keys * weight.keys.detach()[..., None]
        if weight.values is not None:
            pairs.append((weight.values, torch.linalg.vecdot(to_values, values)))
            to_values = to_values * weight.values.detach()[..., None]
        if weight.radius is not None:
            length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            pairs.append((weight.radius, (to_radius * length)[..., 0]))
            along = to_radius * weight.radius.detach()[..., None] / length.clamp_min(TINY)
            to_values = torch.addcmul(to_values, values, along * (length >= TINY))
        unrotated = self.prepared.backward(to_keys.transpose(1, 2), d_norm)[..., self.rotary_dim :]
        return unrotated, to_values.transpose(1, 2), self._gate_gradient(pairs)

    def _gate_gradient(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        """From weights and their gradients."""
        found = [(weight, slope) for weight, slope in pairs if weight.requires_grad]
        if not found or self.gate is None:
            return None
        (share,) = torch.autograd.grad([w for w, _ in found], [self.gate], [slope for _, slope in found])
        return share.transpose(1, 2)
