"""The shapes that are measured, and random inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.layers import Flops, Site
from hybrid.layers.attention import FullAttention
from hybrid.layers.kvm.mixer import KVM
from hybrid.layers.kvm.spec import KVMSpec

BUDGETS = ("fixed", "sqrt")


@dataclass(frozen=True)
class Sizes:
    """All lengths in tokens, multiples of the chunk."""

    heads: int = 6
    head_dim: int = 128
    chunk: int = 256
    window_chunks: int = 2
    slots: int = 256
    """Of the fixed budget, and the least of the growing one."""
    factor: float = 16.0
    """The growing budget is factor * sqrt(t)."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Of training; the plot's. The numbers to reach are for `short` and `long`."""
    short: int = 8192
    long: int = 32768
    prefill: int = 131072
    prefill_base: int = 16384
    piece: int = 8192
    """Tokens per call of a prefill."""
    decode_base: int = 2048
    decode: int = 65536
    cached_tokens: int = 16
    """Tokens decoded in a row with a full cache; with KVM it is a chunk."""
    layers: int = 12
    model_tokens: int = 4096
    vocabulary: int = 4096
    window_short: int = 2048
    window_long: int = 32768
    copy_bytes: int = 2**28
    rounds: int = 5
    batch: int = 1
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def options(self, budget: str) -> dict[str, Any]:
        """Of the `kvm` kind."""
        return {
            "num_heads": self.heads,
            "head_dim": self.head_dim,
            "chunk": self.chunk,
            "window_chunks": self.window_chunks,
            "budget": "fixed" if budget == "fixed" else "power_law",
            "budget_minimum": self.slots,
            "budget_factor": self.factor,
        }

    def kvm(self, budget: str) -> KVM:
        """The layer, without storage."""
        with torch.device("meta"):
            return KVM(KVM.Options(**self.options(budget)), Site(self.hidden))

    def full(self) -> FullAttention:
        with torch.device("meta"):
            return FullAttention(
                FullAttention.Options(num_heads=self.heads, head_dim=self.head_dim), Site(self.hidden)
            )

    def operands(self, tokens: int, seed: int = 0) -> Operands:
        """Random ones; the last are kept, as runs that take turns have the same."""
        return _drawn(self, tokens, seed)

    def name(self, budget: str) -> str:
        return f"fixed {self.slots}" if budget == "fixed" else f"{self.factor:g} sqrt(t)"


QUICK = Sizes(
    heads=2, head_dim=16, chunk=16, slots=16, factor=4.0, lengths=(64, 128, 256), short=128, long=256,
    prefill=512, prefill_base=128, piece=64, decode_base=64, decode=256, cached_tokens=4, layers=2,
    model_tokens=64, vocabulary=64, window_short=64, window_long=256, copy_bytes=2**20, rounds=3,
)  # fmt: skip
"""Seconds for everything: what the tests run."""


def operator_flops(layer: KVM | FullAttention, tokens: int) -> Flops:
    """Per token, without the projections: what the first token costs beside the one key it sees."""
    whole, first = layer.flops_per_token(tokens), layer.flops_at(0)
    projections = first.differentiable - 4.0 * layer.num_heads * layer.head_dim
    return Flops(whole.differentiable - projections, whole.routing)


@dataclass(frozen=True)
class Operands:
    """`kvm_attention`'s tensors, as its layer gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    front: Tensor
    back: Tensor

    @classmethod
    def random(cls, sizes: Sizes, tokens: int, seed: int = 0) -> Operands:
        """For `tokens` tokens, with normalised queries and keys."""
        device, shape = sizes.device, (sizes.batch, tokens, sizes.heads, sizes.head_dim)
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        q, k = (F.layer_norm(draw(*shape), shape[-1:]).to(sizes.dtype) for _ in "qk")
        v = draw(*shape).to(sizes.dtype)
        gate = 1 + F.elu(draw(*shape[:-1]))
        weight, bias = torch.ones(shape[-1], device=device), torch.zeros(shape[-1], device=device)
        front, back = (torch.ones(sizes.heads, device=device) for _ in range(2))
        return cls(q, k, v, gate, weight, bias, front, back)

    def tokens(self, start: int, end: int) -> Operands:
        cut = {name: getattr(self, name)[:, start:end] for name in ("q", "k", "v", "gate")}
        return replace(self, **cut)

    def settings(self, spec: KVMSpec) -> dict[str, Any]:
        """Keyword arguments beside q, k, v and gate."""
        return {
            "spec": spec,
            "norm_weight": self.norm_weight,
            "norm_bias": self.norm_bias,
            "front_temperature": self.front,
            "state_temperature": self.back,
        }

    def leaves(self) -> list[Tensor]:
        """Everything, ready to receive gradients."""
        every = (self.q, self.k, self.v, self.gate, self.norm_weight, self.norm_bias, self.front, self.back)
        return [x.detach().requires_grad_() for x in every]


@lru_cache(maxsize=1)
def _drawn(sizes: Sizes, tokens: int, seed: int) -> Operands:
    return Operands.random(sizes, tokens, seed)
