"""One softmax over keys that lie in several places, each visited by the kernel that suits it.

Two partial attentions whose outputs are weighted by their log-sum-exps equal one softmax over both key sets.
The backward needs no partial results: each part's gradients follow from the joint output and log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import kernels
from .kernels import Mask

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


def joined_attention(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], parts: list[Part], scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every query over the union of the parts that name it.

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


def part_share(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], part: Part, lse: Tensor, scale: float
) -> Tensor:
    """Attention mass `[rows, H, T]` that the part's queries put on the part's keys, given the joint `lse`."""
    q, k, v = _operands(queries, keys, values, part)
    _, own = kernels.forward(kernels.choose(q), q, k, v, part.mask, scale)
    return torch.exp(own - lse[part.q_rows, :, part.q_tokens])


def _operands(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    q = queries[part.query][part.q_rows, part.q_tokens]
    k = keys[part.key][part.k_rows, part.k_tokens]
    v = values[part.key][part.k_rows, part.k_tokens]
    return q, k, v


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: list[Part], scale: float, num_queries: int, num_keys: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values = _split(tensors, num_queries, num_keys)
        kernel = kernels.choose(queries[0])
        out, lse = _join(kernel, queries, keys, values, parts, scale)
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
        queries, keys, values = _split(tensors, num_queries, num_keys)
        sums = [_Sum(x) for x in tensors]
        dq, dk, dv = _split(sums, num_queries, num_keys)
        for part in parts:
            rows, tokens = part.q_rows, part.q_tokens
            q, k, v = _operands(queries, keys, values, part)
            joint = (grad[rows, tokens], q, k, v, out[rows, tokens], lse[rows, :, tokens])
            shares = kernels.backward(kernel, *joint, part.mask, scale)
            dq[part.query].add(rows, tokens, shares[0])
            dk[part.key].add(part.k_rows, part.k_tokens, shares[1])
            dv[part.key].add(part.k_rows, part.k_tokens, shares[2])
        return None, None, None, None, *(s.result() for s in sums)


def _split(tensors: Any, num_queries: int, num_keys: int) -> tuple[list, list, list]:
    tensors = list(tensors)
    values = num_queries + num_keys
    return tensors[:num_queries], tensors[num_queries:values], tensors[values:]


def _join(
    kernel: str,
    queries: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    parts: list[Part],
    scale: float,
) -> tuple[Tensor, Tensor]:
    rows, tokens, heads, _ = queries[0].shape
    dtype = queries[0].dtype
    if len(parts) == 1 and _everything(parts[0], queries[0]):
        out, lse = kernels.forward(kernel, *_operands(queries, keys, values, parts[0]), parts[0].mask, scale)
        return out.to(dtype), lse
    wide = torch.promote_types(dtype, torch.float32)
    out = queries[0].new_zeros(queries[0].shape, dtype=wide)
    lse = queries[0].new_full((rows, tokens, heads), -torch.inf, dtype=wide).transpose(1, 2)
    for part in parts:
        share, own = kernels.forward(kernel, *_operands(queries, keys, values, part), part.mask, scale)
        at_out, at_lse = (part.q_rows, part.q_tokens), (part.q_rows, ALL, part.q_tokens)
        before = lse[at_lse]
        after = torch.logaddexp(before, own)
        keep, add = (torch.exp(x - after).transpose(1, 2)[..., None] for x in (before, own))
        out[at_out] = out[at_out] * keep + share * add
        lse[at_lse] = after
    return out.to(dtype), lse


def _everything(part: Part, queries: Tensor) -> bool:
    """Whether the part covers all queries, so that its result needs no joining."""
    rows = part.q_rows == ALL if isinstance(part.q_rows, slice) else False
    return rows and part.q_tokens == ALL


class _Sum:
    """A gradient gathered from parts, in at least fp32."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, rows: Rows, tokens: slice, share: Tensor) -> None:
        if self.total is None:
            if isinstance(rows, slice) and rows == ALL and tokens == ALL:
                self.total = share.to(torch.promote_types(share.dtype, torch.float32))
                return
            wide = torch.promote_types(share.dtype, torch.float32)
            self.total = torch.zeros_like(self.like, dtype=wide, memory_format=torch.contiguous_format)
        if isinstance(rows, slice):
            self.total[rows, tokens] += share
        else:
            self.total[:, tokens].index_add_(0, rows, share.to(self.total.dtype))

    def result(self) -> Tensor:
        if self.total is None:
            return torch.zeros_like(self.like)
        return self.total.to(self.like.dtype)
