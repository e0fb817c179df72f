"""Step 4 of KVM attention, `attend`, and its backward; and what all steps of a walk are given.

Shapes: R rows of queries or of keys, C tokens of a row, H query heads, G key/value heads, S slots, D head
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..softmax import Part
from ..softmax.joined import Gradient, Joint, Rows, part_gradients
from .chunks import Group
from .contributions import Norm, Tokens
from .routing import Replay
from .spec import KVMSpec


@dataclass(frozen=True)
class Plan:
    """Settings and order of a walk: all it needs beside tensors."""

    spec: KVMSpec
    scale: float
    kernel: str
    """Of attention."""
    walk: str
    """One of `parallel.WALKS`."""
    groups: Sequence[Group]
    replay: Replay | None
    margins: bool
    measured: bool
    """Whether the window's own log-sum-exp is wanted."""


class Inputs(NamedTuple):
    """The walk's differentiable inputs, or their gradients."""

    q: Tensor  # [R, C, H, D]
    k: Tensor  # [R, C, G, D]
    v: Tensor
    gate: Tensor | None  # [R, C, G]
    front: Tensor | None  # [H, 1], temperatures of window keys
    back: Tensor | None  # and of slots
    weight: Tensor  # [D], the norm of state keys
    bias: Tensor
    state_bias: Tensor | None  # [H, 1], added to the logits of slots

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.bias)

    def entering(self, group: Group) -> Tokens:
        """Select the tokens of a group that enter the state, by row."""
        return Tokens(*self[1:4]).map(lambda x: x[group.entering, group.entering_tokens])


class Backward(NamedTuple):
    """What the backward of a group is given, and what it adds to."""

    plan: Plan
    group: Group
    x: Inputs
    d: Inputs
    d_q: Tensor
    """Gradient of the group's queries, in at least fp32."""
    joint: tuple[Tensor, Tensor, Tensor]
    """The output's gradient, the output, and the log-sum-exp, of the group's queries."""


def scaled(q: Tensor, temperature: Tensor | None) -> Tensor:
    """Multiply queries `[..., H, D]` by their heads' temperatures."""
    return q if temperature is None else (q * temperature).to(q.dtype)


def attend(
    plan: Plan,
    joint: Joint,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: list[Part],
    bias: Tensor | None = None,
) -> None:
    """Step 4: take more keys into the softmax of a group's queries; `bias` `[H, 1]`: on their logits."""
    joint.add(plan.kernel, [q], [keys], [values], parts, plan.scale, bias)


def bias_slope(joint: Joint, window: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the derivative of outputs `[R, C, H, D]` by the bias of the state's logits.

    `window`: output and log-sum-exp over the window alone. With a mass m on the state, of output s, it is
    m (s - y) = (1 - m) (y - window's).
    """
    assert joint.out is not None
    rest = torch.exp(window[1] - joint.lse).transpose(1, 2)[..., None]
    return (joint.out - window[0]).mul_(rest)


def attend_backward(
    plan: Plan,
    joint: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    parts: list[Part],
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Any]:
    """Return gradients of `q`, `keys` and `values`, in at least fp32.

    `joint`: the output's gradient, the output, and the log-sum-exp, of the whole softmax; `into`: what the
    gradients of keys and values are added to.
    """
    d_q, d_keys, d_values = found = Gradient(q), Gradient(keys, into[0]), Gradient(values, into[1])
    gradients = [d_q], [d_keys], [d_values]
    part_gradients(plan.kernel, joint, [q], [keys], [values], parts, plan.scale, gradients)
    return [x.total for x in found]


def window_backward(
    plan: Plan, group: Group, x: Inputs, d: Inputs, joint: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Add gradients of the window's keys and values; return the queries', in at least fp32."""
    q, k, v = x.q[group.queries], x.k[group.keys], x.v[group.keys]
    if not group.window:
        return q.to(x.weight.dtype)  # no queries
    into = (d.k[group.keys], d.v[group.keys]) if isinstance(group.keys, slice) else (None, None)
    d_q, d_k, d_v = attend_backward(plan, joint, scaled(q, x.front), k, v, group.window, into)
    if into[0] is None:
        add_rows(d.k, group.keys, d_k)
        add_rows(d.v, group.keys, d_v)
    _through_temperature(d_q, q, x.front, d.front)
    return d_q


def state_backward(
    b: Backward, rows: slice, keys: Tensor, values: Tensor, parts: list[Part]
) -> tuple[Tensor, Tensor]:
    """Add to the gradients of the group's queries `rows`; return those of the slots, in at least fp32."""
    q = b.x.q[b.group.queries][rows]
    lse = b.joint[2][rows]
    # Logits and bias less the log-sum-exp are logits less what is given here.
    joint = b.joint[0][rows], b.joint[1][rows], lse if b.x.state_bias is None else lse - b.x.state_bias
    d_q, d_keys, d_values = attend_backward(b.plan, joint, scaled(q, b.x.back), keys, values, parts)
    _through_temperature(d_q, q, b.x.back, b.d.back)
    b.d_q[rows] += d_q
    return d_keys, d_values


def _through_temperature(d_q: Tensor, q: Tensor, scale: Tensor | None, d_scale: Tensor | None) -> None:
    """Turn the gradient of `q * scale` into that of `q`, in place; adds to that of `scale`."""
    if scale is not None and d_scale is not None:
        d_scale += torch.linalg.vecdot(d_q, q.to(d_q.dtype)).sum((0, 1))[:, None]
        d_q *= scale


def add_rows(total: Tensor, rows: Rows, share: Tensor) -> None:
    """Add `share` to those rows of `total`."""
    if isinstance(rows, slice):
        total[rows] += share
    else:
        total.index_add_(0, rows, share.to(total.dtype))
