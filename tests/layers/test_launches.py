"""What every layer costs a GPU beside its products: launches, and the host's waits, on a pretended device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hybrid.layers import Context, Site, kinds, mixer_class
from hybrid.layers.kvm import parallel
from hybrid.layers.kvm.attention import Budget, KVMSpec, kvm_attention
from hybrid.layers.linear import fla
from hybrid.layers.linear.delta_rule import gated_delta_rule

from ..parity.linear_reference import delta_steps
from ..pretended_cuda import PretendedDevice, pretended_cuda, stand_in
from .mixers import assert_same_gradients, build, every_kind, packed_context, tokens

LIMITS = {
    "block_window": (80, 110), "full": (60, 90), "gated_deltanet": (600, 700), "kimi_delta": (600, 700),
    "kvm": (450, 270), "mamba2": (250, 300), "ovq": (600, 700), "rwkv7": (600, 700),
    "sliding_window": (80, 110),
}  # fmt: skip
"""Most launches, forward and backward, of a layer at TOKENS tokens in one row."""
FLA_LIMITS = {"gated_deltanet": (40, 60), "kimi_delta": (40, 60), "mamba2": (40, 60), "rwkv7": (65, 140)}
"""The same where kernels of flash-linear-attention compute the recurrence and the convolutions, one launch
each."""
TRITON_LIMITS = (60, 120)
"""Of the KVM operator alone, where Triton's kernels take the walk."""
PACKED = (45, 95)
"""So many more with documents packed in the row."""
TOKENS = dict.fromkeys(LIMITS, 8192) | {"full": 1024, "sliding_window": 4096, "block_window": 4096}
"""Attention of one block launches equally much at any length, and takes long here."""
OPTIONS = {"num_heads": 2, "head_dim": 32, "head_k_dim": 32, "state_size": 16, "budget": "fixed"}
own_kinds = pytest.mark.parametrize("kind", LIMITS)


def layer(kind: str):
    """A small layer in bf16, on the pretended device, in the middle of a model."""
    names = mixer_class(kind).Options.__dataclass_fields__
    options = {name: value for name, value in OPTIONS.items() if name in names}
    if kind == "mamba2":
        del options["num_heads"]
    torch.manual_seed(0)
    mixer = mixer_class(kind)(mixer_class(kind).Options(**options), Site(64, 1, 4))
    return mixer.to(device="cuda", dtype=torch.bfloat16)


def launches(device: PretendedDevice, kind: str, batch: int, lengths: tuple[int, ...] = ()) -> list[int]:
    """Launches of a layer's forward and backward, which must not make the host wait."""
    mixer, count = layer(kind), TOKENS[kind]
    x, embedding = (torch.randn(batch, count, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x.requires_grad_()
    context = packed_context(x, lengths, want_state=False) if lengths else Context.of(x, want_state=False)
    context.embedding = embedding
    device.waits.clear()
    device.count()
    y, _ = mixer(x, context)
    forward = device.count()
    y.backward(y.detach())
    assert not device.waits, "\n".join(device.waits)
    return [forward, device.count()]


def assert_within(found: list[int], limits: tuple[int, int], more: tuple[int, int] = (0, 0)) -> None:
    most = [limit + extra for limit, extra in zip(limits, more, strict=True)]
    print(f"{found} launches of {most}")
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), f"{found} launches of {most}"


def test_every_kind_has_its_limits() -> None:
    own = {kind for kind, mixer in kinds().items() if mixer.__module__.startswith("hybrid.")}
    assert own == LIMITS.keys()


@own_kinds
def test_equal_rows_stay_within_the_limits(kind: str) -> None:
    with pretended_cuda() as device:
        assert_within(launches(device, kind, 1), LIMITS[kind])


@own_kinds
def test_eight_rows_launch_hardly_more_than_one(kind: str, monkeypatch) -> None:
    monkeypatch.setitem(TOKENS, kind, TOKENS[kind] // 8)
    with pretended_cuda() as device:
        one, eight = (launches(device, kind, batch) for batch in (1, 8))
        assert_within(eight, (round(1.1 * one[0]), round(1.1 * one[1])), (10, 10))


@own_kinds
def test_packed_documents_stay_within_the_limits(kind: str) -> None:
    count = TOKENS[kind]
    lengths = (count // 2, count // 4, count // 8, count // 8 - 1, 1)
    with pretended_cuda() as device:
        assert_within(launches(device, kind, 1, lengths), LIMITS[kind], PACKED)


@pytest.mark.parametrize("budget", ["fixed", "power_law"])
@pytest.mark.parametrize("batch", [1, 8])
def test_kvm_with_any_budget_stays_within_the_limits(budget: str, batch: int, monkeypatch) -> None:
    monkeypatch.setitem(OPTIONS, "budget", budget)
    monkeypatch.setitem(OPTIONS, "chunk", 32)  # as many chunks as there are at 8192 tokens with those of 256
    monkeypatch.setitem(OPTIONS, "budget_minimum", 32)
    monkeypatch.setitem(TOKENS, "kvm", 1024)
    with pretended_cuda() as device:
        assert_within(launches(device, "kvm", batch), LIMITS["kvm"])


@pytest.mark.parametrize("budget", ["fixed", "power_law"])
@pytest.mark.parametrize("batch", [1, 8])
def test_kvm_with_tritons_kernels_launches_little(budget: str, batch: int, monkeypatch) -> None:
    pytest.importorskip("triton")
    from hybrid.layers.kvm.triton import States, route_group, routing, states

    class Launched:
        """A kernel that is counted, and leaves its results as they are."""

        def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **options: Any) -> None:
                with device.one_launch("triton"):
                    pass

            return launch

    monkeypatch.setattr(routing, "route_kernel", Launched())
    monkeypatch.setattr(states, "read_kernel", Launched())
    monkeypatch.setattr(states, "read_backward_kernel", Launched())
    spec = KVMSpec(256, 2, 8, budget=Budget(budget, 256, 16.0))
    ours = mock.patch.object(parallel, "_kernels", return_value=(route_group, States))
    with pretended_cuda() as device, ours:
        q, k, v = (torch.randn(batch, 8192, n, 16, dtype=torch.bfloat16, device="cuda") for n in (2, 1, 1))
        gate = torch.rand(batch, 8192, 1, device="cuda")
        weight, bias, front, back = (torch.ones(n, device="cuda") for n in (16, 16, 2, 2))
        leaves = [x.requires_grad_() for x in (q, k, v, gate, weight, bias, front, back)]
        device.waits.clear()
        device.count()
        y, _, _ = kvm_attention(
            q, k, v, gate, spec=spec, norm_weight=weight, norm_bias=bias, front_temperature=front,
            state_temperature=back, want_state=False, want_routes=False,
        )  # fmt: skip
        forward = device.count()
        torch.autograd.grad(y, leaves, y.detach())
        assert not device.waits, "\n".join(device.waits)
        assert_within([forward, device.count()], TRITON_LIMITS)


@pytest.mark.parametrize("kind", FLA_LIMITS)
@pytest.mark.parametrize("lengths", [(), (100, 60, 95, 1)])
def test_with_the_kernels_of_fla_little_is_left(kind: str, lengths: tuple[int, ...], monkeypatch) -> None:
    def recurrence(
        *, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, **rest
    ) -> tuple[Tensor, Tensor]:
        """Of the right shapes."""
        assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
        used = sum((x.sum() * 0 for x in (k, *rest.values()) if isinstance(x, Tensor)), torch.zeros(()))
        states = v.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        return (v + used).to(v.dtype), used + torch.zeros(states, v.shape[2], k.shape[3], v.shape[3])

    def convolution(*, x: Tensor, weight: Tensor, **rest):
        used = sum((z.sum() * 0 for z in (weight, *rest.values()) if isinstance(z, Tensor)), torch.zeros(()))
        return (x + used).to(x.dtype), x[:, -4:].mT

    monkeypatch.setitem(TOKENS, kind, 256)
    with pretended_cuda() as device:
        kernels = {
            "conv": stand_in(device, "conv", convolution),
            "rule": stand_in(device, "rule", recurrence),
        }
        monkeypatch.setattr(
            fla, "load_kernels", lambda *names: (kernels["conv" if "conv" in names[1] else "rule"],)
        )
        found = launches(device, kind, 1, lengths)
        assert_within(found, FLA_LIMITS[kind], (15, 15) if lengths else (0, 0))


@every_kind
@pytest.mark.parametrize("lengths", [(), (70, 1, 29, 50)])
def test_the_pretended_device_computes_what_the_cpu_does(kind: str, lengths: tuple[int, ...]) -> None:
    """Also where the forms for GPUs differ, such as linear recurrences."""

    def computed(device: str) -> dict[str, Tensor]:
        mixer, x = build(kind, torch.float32).to(device), tokens(1, 150, torch.float32).to(device)
        x.requires_grad_()
        more = {"want_state": False}
        y, _ = mixer(x, packed_context(x, lengths, **more) if lengths else Context.of(x, **more))
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(device)
        (y * weight).sum().backward()
        named = {"x": x, **dict(mixer.named_parameters())}
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
        return {name: value.detach().cpu() for name, value in (found | {"y": y}).items()}

    expected = computed("cpu")
    with pretended_cuda():
        found = computed("cuda")
    assert_same_gradients(found, expected, 2e-4)


@pytest.mark.parametrize("scale", [0.1, 3.0, 1000.0])
@pytest.mark.parametrize("channels", [(), (16,)])
def test_the_delta_rule_holds_any_decay_on_a_gpu(scale: float, channels: tuple[int, ...]) -> None:
    """Nobody asks there how fast decays are, as the host would wait for the answer."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 16) for _ in range(3))
    g = -scale * torch.rand(1, 200, 2, *channels) ** 4
    operands = [q, torch.nn.functional.normalize(k, dim=-1), v, g, torch.rand(1, 200, 2)]

    def computed(rule, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [x.to(dtype).to(device).detach().requires_grad_() for x in operands]
        y, state = rule(*leaves)
        (y * torch.sin(y.detach())).sum().backward()
        found = [y.detach(), state.detach(), *(x.grad for x in leaves)]
        return {str(place): x.cpu().double() for place, x in enumerate(found)}

    expected = computed(delta_steps, "cpu", torch.float64)
    with pretended_cuda() as device:
        found = computed(gated_delta_rule, "cuda", torch.float32)
        assert all(wait.startswith("copy") for wait in device.waits)  # ours, around it
    assert_same_gradients(found, expected, 1e-5)
