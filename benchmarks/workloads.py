"""What is timed of attention operators: sizes, random inputs, and runs (functions without arguments).

A run is of `what`: `full`, torch's causal attention, or KVM with one of the BUDGETS.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.layers import Context, Flops, Site
from hybrid.layers.attention import FullAttention
from hybrid.layers.kvm.attention import KVMState, kvm_attention
from hybrid.layers.kvm.mixer import KVM
from hybrid.layers.kvm.spec import KVMSpec

from .measure import Run, Steps

BUDGETS = ("fixed", "sqrt")
OPERATOR = partial(kvm_attention, want_state=False)


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
    prefill_call: int = 8192
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
        """Options of the `kvm` kind."""
        return {
            "num_heads": self.heads, "head_dim": self.head_dim, "chunk": self.chunk,
            "window_chunks": self.window_chunks, "budget": "fixed" if budget == "fixed" else "power_law",
            "budget_minimum": self.slots, "budget_factor": self.factor,
        }  # fmt: skip

    def kvm(self, budget: str) -> KVM:
        """Make the layer, without storage."""
        with torch.device("meta"):
            return KVM(KVM.Options(**self.options(budget)), Site(self.hidden))

    def layer(self, what: str) -> KVM | FullAttention:
        """Make the layer of `what`, without storage."""
        if what != "full":
            return self.kvm(what)
        with torch.device("meta"):
            options = FullAttention.Options(num_heads=self.heads, head_dim=self.head_dim)
            return FullAttention(options, Site(self.hidden))

    def flops(self, what: str, tokens: int) -> Flops:
        """Count the operator's FLOPs per token: the layer's without its projections, which are what the first
        token costs beside the one key it sees."""
        layer = self.layer(what)
        whole, first = layer.flops_per_token(tokens), layer.flops_at(0)
        projections = first.differentiable - 4.0 * self.hidden
        return Flops(whole.differentiable - projections, whole.routing)

    def ideal(self, what: str, tokens: int) -> float:
        """Return how many times fewer training FLOPs are counted than for full attention."""
        return self.flops("full", tokens).training / self.flops(what, tokens).training

    def name(self, budget: str) -> str:
        return f"fixed {self.slots}" if budget == "fixed" else f"{self.factor:g} sqrt(t)"


QUICK = Sizes(
    heads=2, head_dim=16, chunk=16, slots=16, factor=4.0, lengths=(64, 128, 256), short=128, long=256,
    prefill=512, prefill_base=128, prefill_call=64, decode_base=64, decode=256, cached_tokens=4, layers=2,
    model_tokens=64, vocabulary=64, window_short=64, window_long=256, copy_bytes=2**20, rounds=3,
)  # fmt: skip
"""Seconds for everything: what the tests run."""


class Operands(NamedTuple):
    """`kvm_attention`'s tensors, as its layer gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    front_temperature: Tensor
    state_temperature: Tensor

    def tokens(self, start: int, end: int) -> Self:
        return self._replace(**{name: getattr(self, name)[:, start:end] for name in ("q", "k", "v", "gate")})

    def leaves(self) -> Self:
        """Return them ready to receive gradients."""
        return type(self)(*(x.detach().requires_grad_() for x in self))

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v laid out the way torch's own attention likes them."""
        q, k, v = (x.transpose(1, 2).contiguous() for x in self[:3])
        return q, k, v

    def given_to(self, operator: Callable[..., Any], spec: KVMSpec, **more: Any) -> Any:
        return operator(*self[:4], spec=spec, **dict(zip(self._fields[4:], self[4:], strict=True)), **more)


@lru_cache(maxsize=1)
def operands(sizes: Sizes, tokens: int, seed: int = 0) -> Operands:
    """Draw normalised queries and keys, and the rest; the last are kept, for runs that take turns."""
    device, shape = sizes.device, (sizes.batch, tokens, sizes.heads, sizes.head_dim)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k = (F.layer_norm(draw(*shape), shape[-1:]).to(sizes.dtype) for _ in "qk")
    v = draw(*shape).to(sizes.dtype)
    gate = 1 + F.elu(draw(*shape[:-1]))
    weight, bias = torch.ones(shape[-1], device=device), torch.zeros(shape[-1], device=device)
    front, back = (torch.ones(sizes.heads, device=device) for _ in range(2))
    return Operands(q, k, v, gate, weight, bias, front, back)


def training(sizes: Sizes, what: str, tokens: int, operator: Callable[..., Any] = OPERATOR) -> Run:
    """Forward and backward, with gradients of all inputs; `operator`: the KVM operator or a twin of it."""
    drawn = operands(sizes, tokens)
    if what == "full":
        leaves: Any = [x.requires_grad_() for x in drawn.heads_first()]
        forward: Run = partial(_full_attention, leaves)
    else:
        leaves = drawn.leaves()
        forward = partial(leaves.given_to, operator, sizes.kvm(what).spec)
    grad = torch.randn_like(leaves[0])

    def run() -> None:
        y = forward()
        torch.autograd.grad(y[0] if isinstance(y, tuple) else y, leaves, grad)

    return run


def forward(sizes: Sizes, what: str, tokens: int) -> Run:
    """Forward alone, keeping nothing for a backward."""
    drawn = operands(sizes, tokens)
    if what == "full":
        run: Run = partial(_full_attention, drawn.heads_first())
    else:
        run = partial(drawn.given_to, OPERATOR, sizes.kvm(what).spec)
    return torch.no_grad()(run)


def _full_attention(qkv: Sequence[Tensor]) -> Tensor:
    q, k, v = qkv
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def prefill(sizes: Sizes, budget: str, tokens: int) -> Run:
    """Read a sequence through one layer's state, call by call."""
    layer = KVM(KVM.Options(**sizes.options(budget)), Site(sizes.hidden))
    x = torch.randn(1, tokens, sizes.hidden, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run() -> None:
        state = None
        for part in x.split(sizes.prefill_call, 1):
            _, state = layer(part, Context.of(part), state)

    return run


@torch.no_grad()
def kvm_decoding(sizes: Sizes, budget: str, position: int) -> tuple[Run, Callable[[], KVMState]]:
    """Decode a chunk of tokens, one update of the state among them, on from where the last run ended.

    Returns the run, and a function that returns the state as it is now.
    """
    spec = sizes.kvm(budget).spec
    state: Any = None
    for start in range(0, position, sizes.prefill_call):
        part = operands(sizes, min(sizes.prefill_call, position - start), seed=start)
        _, state, _ = part.given_to(kvm_attention, spec, state=state)
    drawn = operands(sizes, sizes.chunk)
    tokens = [drawn.tokens(t, t + 1) for t in range(sizes.chunk)]

    @torch.no_grad()
    def run() -> None:
        nonlocal state
        for one in tokens:
            _, state, _ = one.given_to(kvm_attention, spec, state=state)

    return run, lambda: state


def full_decoding(sizes: Sizes, position: int) -> Run:
    """Decode tokens over a cache in a buffer, by torch's own attention."""
    q, k, v = operands(sizes, position + sizes.cached_tokens).heads_first()
    keys, values = k.clone(), v.clone()

    @torch.no_grad()
    def run() -> None:
        for t in range(position, position + sizes.cached_tokens):
            keys[:, :, t], values[:, :, t] = k[:, :, t], v[:, :, t]
            F.scaled_dot_product_attention(q[:, :, t : t + 1], keys[:, :, : t + 1], values[:, :, : t + 1])

    return run


def copying(sizes: Sizes) -> Run:
    """Move `copy_bytes` bytes from one place to another."""
    source, target = torch.rand(2, sizes.copy_bytes // 4, device=sizes.device)
    return partial(target.copy_, source)


STEPS = {
    "route": "route",
    "contributions": "accumulate",
    "accumulate": "accumulate",
    "read": "read",
    "refresh": "read",
    "attend": "attend",
    "accumulate_backward": "accumulate, backward",
    "read_backward": "read, backward",
    "attend_backward": "attend, backward",
}
"""Functions and methods of `hybrid.layers.kvm` by name -> the operator's step their time is booked on."""
OTHER = "other (norms, gates, gradients of inputs)"


def kvm_steps(run: Run, device: str = "cpu") -> dict[str, float]:
    """Measure seconds of one forward and backward of the operator by step; the second of two runs."""
    run()
    watched: dict[tuple[Any, str], str] = {}
    for module in [m for name, m in sys.modules.items() if name.startswith("hybrid.layers.kvm.")]:
        for owner in (module, *(x for x in vars(module).values() if inspect.isclass(x))):
            own = {name for name in STEPS if inspect.isfunction(vars(owner).get(name))}
            watched |= {(owner, name): STEPS[name] for name in own}
    steps = Steps(device)
    with steps.watching(watched), steps.step(OTHER):
        run()
    return dict(steps.seconds)
