"""Groups of chunks worked on at once, as on a GPU, against one chunk after the other."""

import pytest
import torch

from hybrid.layers.errors import LayerError
from hybrid.layers.kvm import parallel, steps
from hybrid.layers.kvm.attention import Budget, KVMSpec, kvm_attention
from hybrid.layers.kvm.chunks import groups
from hybrid.layers.kvm.parallel import choose_walk, force_walk

SPECS = {
    "growing": KVMSpec(8, 2, 4, 1, Budget("power_law", 8, 4.0)),
    "fixed": KVMSpec(8, 2, 4, 2, Budget("fixed", 20), gate_initial=True),
    "gated appends": KVMSpec(8, 3, 4, 0, Budget("saturation", saturation=60), gate_appends=True),
    "no key gates": KVMSpec(8, 1, 4, 8, Budget("power_law", 16, 6.0, round_to=4), gate_keys=False),
    "counts": KVMSpec(8, 2, 4, 1, Budget("power_law", 8, 4.0, max_chunks=2), values="counts"),
    "reference counts": KVMSpec(8, 2, 4, 1, Budget("fixed", 8), values="reference_counts"),
    "short chunks": KVMSpec(2, 2, 4, 0, Budget("power_law", 3, 2.5)),
}
CALLS = {"one call": [75], "odd calls": [3, 30, 1, 41], "packed": [40, 1, 34]}


def inputs(dtype: torch.dtype, batch: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(batch, 75, 4, 8), *[(batch, 75, 2, 8)] * 2, (batch, 75, 2), (8,), (8,), (4,), (4,), (4,)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    tensors[3] = tensors[3].abs() * (tensors[3] > -1)  # some gates are 0
    return [x.to(dtype).requires_grad_() for x in tensors]


def run(name: str, spec: KVMSpec, lengths: list[int], packed: bool, leaves: list[torch.Tensor]):
    """Outputs, the last state and all gradients, its own among them."""
    *tokens, weight, bias, front, back, state_bias = leaves
    options = {
        "norm_weight": weight,
        "norm_bias": bias,
        "front_temperature": front,
        "state_temperature": back,
        "state_bias": state_bias,
    }
    state, outputs, routes = None, [], []
    with force_walk(name):
        parts = [tokens] if packed else zip(*(x.split(lengths, 1) for x in tokens), strict=True)
        for part in parts:
            more = {"lengths": tuple(lengths)} if packed else {"state": state}
            y, state, own = kvm_attention(*part, spec=spec, **more, **options)
            outputs.append(y)
            routes += [own.slot, own.founds]
    found = [torch.cat(outputs, 1), *(() if state is None else state.tensors().values())]
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x.dtype)).sum() for x in found)
    return found, routes, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("calls", CALLS)
def test_groups_at_once_equal_chunk_by_chunk(spec, calls, monkeypatch):
    leaves, packed = inputs(torch.float64, 1 if calls == "packed" else 2), calls == "packed"
    want = run("chunks", spec, CALLS[calls], packed, leaves)
    for limit in (steps.GROUP_BYTES, 30_000):  # all updates in one group, and few
        monkeypatch.setattr("hybrid.layers.kvm.chunks.GROUP_BYTES", limit)
        groups.cache_clear()
        assert_equal(run("torch", spec, CALLS[calls], packed, leaves), want, 1e-9)
    groups.cache_clear()


@pytest.mark.parametrize("calls", CALLS)
def test_tritons_kernels_equal_chunk_by_chunk(calls):
    pytest.importorskip("triton")
    leaves, packed = inputs(torch.float32, 1 if calls == "packed" else 2), calls == "packed"
    arguments = SPECS["growing"], CALLS[calls], packed, leaves
    assert_equal(run("triton", *arguments), run("chunks", *arguments), 1e-4)


def assert_equal(got, want, tolerance):
    for mine, theirs in zip(got[1], want[1], strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip((*got[0], *got[2]), (*want[0], *want[2]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_groups_with_replayed_routes_equal_their_own_choice():
    leaves, spec = inputs(torch.float64, 2), SPECS["growing"]
    with force_walk("torch"):
        options = {"spec": spec, "norm_weight": leaves[4], "norm_bias": leaves[5]}
        y, _, routes = kvm_attention(*leaves[:4], **options)
        again, _, same = kvm_attention(*leaves[:4], routes=routes, **options)
    assert torch.equal(y, again)
    assert torch.equal(routes.slot, same.slot)


def test_the_walk_is_chosen_by_device_and_environment(monkeypatch):
    k = torch.zeros(1, 1, 1, 8)
    assert choose_walk(k) == "chunks"
    monkeypatch.setenv("HYBRID_KVM_WALK", "torch")
    assert choose_walk(k) == "torch"
    assert choose_walk(k, margins=True) == "chunks"
    with force_walk("chunks"):
        assert choose_walk(k) == "chunks"
    monkeypatch.setenv("HYBRID_KVM_WALK", "fast")
    with pytest.raises(LayerError, match=r"HYBRID_KVM_WALK is 'fast'; allowed: chunks, torch, triton"):
        choose_walk(k)
    with pytest.raises(LayerError, match="fast"), force_walk("fast"):
        pass
    monkeypatch.setenv("HYBRID_KVM_WALK", "triton")
    monkeypatch.setattr(parallel, "_kernels", lambda: None)
    with pytest.raises(LayerError, match="triton is not installed"):
        choose_walk(k)
