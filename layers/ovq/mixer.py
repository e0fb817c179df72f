"""OVQ as a layer: the projections around `ovq_attention`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base import Flops
from ..context import Context
from ..errors import require_counts, require_flags
from ..norms import compute_dtype
from ..parameters import initialise
from ..projections import Projected, ProjectedMixer, ProjectedState
from ..registry import register
from .attention import OVQState, ovq_attention
from .dictionary import size_after


@dataclass
class OVQOptions:
    """Options of the OVQ mixer; values out of range raise LayerError."""

    num_heads: int | None = None
    """H. None: hidden_size / head_dim."""
    head_dim: int | None = None
    """D. None: hidden_size / num_heads, or 128 where num_heads is None too."""
    chunk: int = 256
    """Tokens that enter the dictionary together; a query sees those of its own chunk exactly."""
    max_centroids: int = 1024
    """M: after t tokens (whole chunks) the dictionary has t * M / (t + M) centroids."""
    token_shift: bool = True
    """Mix each projected q, k and v with the previous token's."""
    value_residual: bool = True
    """Gate values towards those of the first layer of this kind."""

    # What the projections ask of other kinds' options, and this kind leaves no choice in.
    num_kv_heads: ClassVar[None] = None
    rotary_dim: ClassVar[int] = 0
    rotary_frequencies: ClassVar[None] = None
    qk_norm: ClassVar[str] = "none"
    qkv_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_counts(self, "num_heads", "head_dim", nullable=True)
        require_counts(self, "chunk", "max_centroids")
        require_flags(self, "token_shift", "value_residual")


@dataclass
class OVQLayerState(ProjectedState):
    """State of the operator beside the token shift's vectors."""

    operator: OVQState | None = None


@register("ovq")
class OVQ(ProjectedMixer):
    """Queries and keys of unit length; the logit of a centroid of n tokens is `q . k + log n`."""

    Options = OVQOptions
    kept_vectors = 26.0

    def _build(self) -> None:
        self.beta = nn.Parameter(torch.empty(self.num_heads))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        initialise(self.beta, nn.init.ones_)

    def project(self, x: Tensor, context: Context, state: Any) -> Projected:
        heads = super().project(x, context, state)
        wide = compute_dtype(heads.q)
        scale = self.own(self.beta, context).to(wide)[:, None] * math.sqrt(self.head_dim)
        q, k = _unit(heads.q.to(wide)) * scale, _unit(heads.k.to(wide))
        return heads._replace(q=q.to(heads.q.dtype), k=k.to(heads.k.dtype))

    def core(
        self, heads: Projected, context: Context, state: OVQLayerState | None
    ) -> tuple[Tensor, OVQLayerState | None]:
        routes, layer = context.routes, self.site.layer
        if context.statistics is not None:
            context.note(layer, sharpness=self.beta)
        y, operator, made = ovq_attention(
            heads.q,
            heads.k,
            heads.v,
            chunk=self.options.chunk,
            max_centroids=self.options.max_centroids,
            state=None if state is None else state.operator,
            lengths=context.row_lengths,
            routes=None if routes is None else routes.get(layer),
        )
        if routes is not None:
            routes.setdefault(layer, made)
        if operator is None or not context.want_state:
            return y, None
        return y, OVQLayerState(operator.position, *heads.shift, operator)

    def empty_state(self, batch: int) -> OVQLayerState:
        like = self.c_k.weight.new_empty(batch, 0, self.num_heads, self.head_dim)
        return OVQLayerState(operator=OVQState.empty(like, self.options.max_centroids))

    # FLOPs and bytes

    def flops_at(self, position: int) -> Flops:
        number, within = divmod(position, self.options.chunk)
        visible = self._size(number) + within + 1
        return self._token_flops(visible, self._routing_flops(number) / self.options.chunk)

    def flops_per_token(self, context_length: int) -> Flops:
        chunk, visible, routing = self.options.chunk, 0, 0.0
        for number, first in enumerate(range(0, context_length, chunk)):
            count = min(chunk, context_length - first)
            visible += count * self._size(number) + count * (count + 1) // 2
            routing += self._routing_flops(number) if count == chunk else 0
        return self._token_flops(visible / context_length, routing / context_length)

    def _size(self, chunks: int) -> int:
        return size_after(chunks, self.options.chunk, self.options.max_centroids)

    def _routing_flops(self, number: int) -> float:
        """Count FLOPs of comparing the keys of chunk `number` with every centroid, or with the chunk's first
        key."""
        size, chunk = self._size(number), self.options.chunk
        products = chunk * size
        if size == 0:
            products = chunk - 1 if self._size(number + 1) > 1 else 0
        return 2.0 * products * self.q_width

    def _token_flops(self, visible: float, routing: float) -> Flops:
        return self.projection_flops() + Flops(4.0 * self.q_width * visible, routing)

    def state_bytes(self, context_length: int, element_size: int = 4) -> int:
        centroids = self.options.max_centroids * (2 * self.q_width + self.num_heads) * max(element_size, 4)
        pending = 2 * (context_length % self.options.chunk) * self.q_width * element_size
        return centroids + pending + self.shift_bytes(context_length, element_size)


def _unit(x: Tensor) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-5)
