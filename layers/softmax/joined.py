"""One softmax over keys that lie in several places, each visited by the kernel that suits it.

Two partial attentions whose outputs are weighted by their log-sum-exps equal one softmax over both key sets.
The backward needs no partial results: each part's gradients follow from the joint output and log-sum-exp.

`joined_attention` does both. `Joint` and `part_gradients` are its two halves, for callers that make keys as
they go and have a backward of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kernels
from . import ragged as ragged_kernels
from .kernels import Mask
from .ragged import Ragged

Rows = slice | Tensor
ALL = slice(None)


class Part(NamedTuple):
    """Queries `queries[query][q_rows, q_tokens]` over keys `keys[key][k_rows, k_tokens]`.

    Row selections are slices or int64 index tensors; key rows may repeat, query rows may not. `query` picks
    one of several versions of the same queries (scaled differently for different keys).
    """

    q_rows: Rows = ALL
    q_tokens: slice = ALL
    query: int = 0
    k_rows: Rows = ALL
    k_tokens: slice = ALL
    key: int = 0
    mask: Mask = Mask.FULL
    ragged: Ragged | None = None
    """The rows have different numbers of keys: these are `[K, G, D]`, without `k_rows` and `k_tokens`."""


def joined_attention(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], parts: list[Part], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention of every query over the union of the parts that name it.

    Args:
        queries: versions of the queries, each `[R, T, H, D]`.
        keys, values: sources, each `[K, S, G, D]` with its own K and S.
        parts: must show a query no key twice. A query in no part gets 0.

    Returns:
        Output `[R, T, H, D]` in the queries' dtype, and log-sum-exp `[R, H, T]` in at least fp32 (-inf where
        there is no key), which carries no gradient.
    """
    out, lse = _Joined.apply(parts, scale, len(queries), len(keys), *queries, *keys, *values)
    return out, lse


class Joint:
    """A softmax that grows part by part: output `[R, T, H, D]` and log-sum-exp `[R, H, T]`, fp32 or wider."""

    def __init__(self, like: Tensor, into: Tensor | None = None) -> None:
        """`like`: the queries; `into`: where the result goes, like the queries (None: new memory)."""
        rows, tokens, heads, _ = like.shape
        self.dtype = torch.promote_types(like.dtype, torch.float32)
        self.like, self.into = like, into
        self.out: Tensor | None = None
        self.lse = like.new_full((rows, tokens, heads), -torch.inf, dtype=self.dtype).transpose(1, 2)

    def add(
        self,
        kernel: str,
        queries: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        parts: list[Part],
        scale: float,
        bias: Tensor | None = None,
    ) -> None:
        """Add keys to the softmax; `bias` `[H, 1]` is added to their logits."""
        for part in parts:
            q, k, v = _operands(queries, keys, values, part)
            if part.ragged is not None:
                partial, own = ragged_kernels.forward(kernel, q, k, v, part.ragged, scale)
            else:
                partial, own = kernels.forward(kernel, q, k, v, part.mask, scale)
            own = own if bias is None else own + bias
            if self.out is None and _everything(part, self.like):
                self.out, self.lse = partial.to(self.dtype), own
                continue
            if self.out is None:
                self.out = torch.zeros(self.like.shape, dtype=self.dtype, device=self.like.device)
            at_out, at_lse = (part.q_rows, part.q_tokens), (part.q_rows, ALL, part.q_tokens)
            before = self.lse[at_lse]
            after = torch.logaddexp(before, own)
            weight = torch.exp(own - after).transpose(1, 2)[..., None]
            if self._may_move() and _everything(part, self.like):
                self.out = torch.lerp(self.out, partial, weight, out=self.into)
            elif isinstance(part.q_rows, slice):
                self.out[at_out].lerp_(partial.to(self.dtype), weight)
            else:
                self.out[at_out] = self.out[at_out].lerp_(partial.to(self.dtype), weight)
            self.lse[at_lse] = after

    def _may_move(self) -> bool:
        """Whether the output can go on growing where it is to be in the end, without a copy of its own."""
        return self.into is not None and self.into is not self.out and self.into.dtype == self.dtype

    def result(self) -> tuple[Tensor, Tensor]:
        """Give the output in the queries' dtype, and the log-sum-exp."""
        out = torch.zeros_like(self.like) if self.out is None else self.out
        if self.into is None:
            return out.to(self.like.dtype), self.lse
        if self.into is not out:
            self.into.copy_(out)
        return self.into, self.lse


class Gradient:
    """Sum of a gradient's contributions from parts, in at least fp32."""

    def __init__(self, like: Tensor, total: Tensor | None = None) -> None:
        """`like`: what the gradient is of; `total`: what the parts are added to, in place."""
        self.like = like
        self.total = total

    def add(self, rows: Rows, tokens: slice, grad: Tensor) -> None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        if self.total is None and grad.shape == self.like.shape and isinstance(rows, slice):
            self.total = grad.to(wide)
            return
        if self.total is None:
            self.total = torch.zeros(self.like.shape, dtype=wide, device=grad.device)
        if isinstance(rows, slice):
            self.total[rows, tokens] += grad
        else:
            self.total[:, tokens].index_add_(0, rows, grad.to(wide))

    def result(self) -> Tensor:
        return torch.zeros_like(self.like) if self.total is None else self.total.to(self.like.dtype)


def part_gradients(
    kernel: str,
    joint: tuple[Tensor, Tensor, Tensor],
    queries: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    parts: list[Part],
    scale: float,
    gradients: tuple[list[Gradient], list[Gradient], list[Gradient]],
) -> None:
    """Add what the parts contribute to the gradients of queries, keys and values.

    `joint`: the output's gradient, the output, and the log-sum-exp, of the whole softmax.
    """
    grad, out, lse = joint
    for part in parts:
        rows, tokens = part.q_rows, part.q_tokens
        q, k, v = _operands(queries, keys, values, part)
        own = grad[rows, tokens], out[rows, tokens], lse[rows, :, tokens]
        if part.ragged is not None:
            grads = ragged_kernels.backward(kernel, own, q, k, v, part.ragged, scale)
        else:
            grads = kernels.backward(kernel, own, q, k, v, part.mask, scale)
        gradients[0][part.query].add(rows, tokens, grads[0])
        gradients[1][part.key].add(part.k_rows, part.k_tokens, grads[1])
        gradients[2][part.key].add(part.k_rows, part.k_tokens, grads[2])


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: list[Part], scale: float, num_queries: int, num_keys: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values = _split(tensors, num_queries, num_keys)
        kernel = kernels.choose(queries[0])
        joint = Joint(queries[0])
        joint.add(kernel, queries, keys, values, parts, scale)
        out, lse = joint.result()
        ctx.save_for_backward(out, lse, *tensors)
        ctx.plan = (kernel, parts, scale, num_queries, num_keys)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        kernel, parts, scale, num_queries, num_keys = ctx.plan
        out, lse, *tensors = ctx.saved_tensors
        if grad is None:
            return (None,) * (4 + len(tensors))
        operands = _split(tensors, num_queries, num_keys)
        sums = [Gradient(x) for x in tensors]
        gathered = _split(sums, num_queries, num_keys)
        part_gradients(kernel, (grad, out, lse), *operands, parts, scale, gathered)
        return None, None, None, None, *(s.result() for s in sums)


def _operands(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    q = queries[part.query][part.q_rows, part.q_tokens]
    if part.ragged is not None:
        return q, keys[part.key], values[part.key]
    k = keys[part.key][part.k_rows, part.k_tokens]
    v = values[part.key][part.k_rows, part.k_tokens]
    return q, k, v


def _split(tensors: Any, num_queries: int, num_keys: int) -> tuple[list, list, list]:
    tensors = list(tensors)
    values = num_queries + num_keys
    return tensors[:num_queries], tensors[num_queries:values], tensors[values:]


def _everything(part: Part, queries: Tensor) -> bool:
    """Whether the part covers all queries."""
    if not isinstance(part.q_rows, slice):
        return False
    shown = (part.q_rows, queries.shape[0]), (part.q_tokens, queries.shape[1])
    return all(selection.indices(size) == (0, size, 1) for selection, size in shown)
