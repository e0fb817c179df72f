"""The runs that are timed: functions without arguments, their inputs made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hybrid.layers import Context, Site
from hybrid.layers.kvm.attention import KVMState, kvm_attention
from hybrid.layers.kvm.mixer import KVM

from .operands import Operands, Sizes

Run = Callable[[], Any]


def kvm_training(sizes: Sizes, budget: str, tokens: int, operator: Callable[..., Any] = kvm_attention) -> Run:
    """Forward and backward of the operator (or its eager twin), with gradients of all inputs."""
    operands = sizes.operands(tokens)
    leaves = operands.leaves()
    settings = Operands(*leaves).settings(sizes.kvm(budget).spec)
    if operator is kvm_attention:
        settings["want_state"] = False
    grad = torch.randn_like(operands.q)

    def run() -> None:
        y = operator(*leaves[:4], **settings)
        torch.autograd.grad(y[0] if isinstance(y, tuple) else y, leaves, grad)

    return run


def kvm_forward(sizes: Sizes, budget: str, tokens: int) -> Run:
    """Forward alone, keeping nothing for a backward."""
    operands = sizes.operands(tokens)
    q, k, v, gate = operands.q, operands.k, operands.v, operands.gate
    settings = operands.settings(sizes.kvm(budget).spec)

    @torch.no_grad()
    def run() -> None:
        kvm_attention(q, k, v, gate, **settings, want_state=False)

    return run


def full_training(sizes: Sizes, tokens: int) -> Run:
    """Forward and backward of torch's causal attention, with tensors laid out the way it likes them."""
    operands = sizes.operands(tokens)
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in (operands.q, operands.k, operands.v))
    grad = torch.randn_like(q)

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), grad)

    return run


def full_forward(sizes: Sizes, tokens: int) -> Run:
    operands = sizes.operands(tokens)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (operands.q, operands.k, operands.v))

    @torch.no_grad()
    def run() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def prefill_run(sizes: Sizes, budget: str, tokens: int) -> Run:
    """Read a sequence through one layer's state, piece by piece."""
    layer = KVM(KVM.Options(**sizes.options(budget)), Site(sizes.hidden))
    x = torch.randn(1, tokens, sizes.hidden, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def run() -> None:
        state = None
        for piece in x.split(sizes.piece, 1):
            _, state = layer(piece, Context.of(piece), state)

    return run


@torch.no_grad()
def kvm_decoding(sizes: Sizes, budget: str, position: int) -> tuple[Run, Callable[[], KVMState]]:
    """Decode a chunk of tokens, one update of the state among them, on from where the last run ended; and the
    state as it is now."""
    spec = sizes.kvm(budget).spec
    state: KVMState | None = None
    for start in range(0, position, sizes.piece):
        count = min(sizes.piece, position - start)
        piece = sizes.operands(count, seed=start)
        _, state, _ = kvm_attention(
            piece.q, piece.k, piece.v, piece.gate, **piece.settings(spec), state=state
        )
    operands = sizes.operands(sizes.chunk)
    tokens = [operands.tokens(t, t + 1) for t in range(sizes.chunk)]

    @torch.no_grad()
    def run() -> None:
        nonlocal state
        for one in tokens:
            _, state, _ = kvm_attention(one.q, one.k, one.v, one.gate, **one.settings(spec), state=state)

    def now() -> KVMState:
        assert state is not None
        return state

    return run, now


def full_decoding(sizes: Sizes, position: int) -> Run:
    """Decode tokens over a cache in a buffer, by torch's own attention."""
    operands = sizes.operands(position + sizes.cached_tokens)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (operands.q, operands.k, operands.v))
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

    return lambda: target.copy_(source)
