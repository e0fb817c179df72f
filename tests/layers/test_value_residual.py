"""The value residual's gate and its start."""

import math

import pytest
import torch

from hybrid.layers import Context, LayerError, Site, mixer_class, value_residual


@pytest.mark.parametrize(("hidden", "rank"), [(16, 32), (768, 32), (1024, 32), (4096, 96)])
def test_rank(hidden, rank):
    assert value_residual.gate_rank(hidden) == rank


def test_gate_moves_values_towards_the_first_ones():
    v, first = torch.tensor([[[2.0, 2.0]]]), torch.tensor([[[4.0, 4.0]]])
    gate0, gate = torch.tensor([0.0, 1.0]), torch.tensor([[[0.0, 1.0]]])
    found = value_residual.mix_values(v, first, gate0, gate)
    torch.testing.assert_close(found, torch.tensor([[[3.0, 2 + 2 / (1 + math.exp(-2))]]]))


def test_start_of_the_gate():
    gate0 = torch.empty(5)
    value_residual.reset_gate0(gate0)
    torch.testing.assert_close(gate0, torch.tensor([0.93, 0.83, 0.73, 0.63, 0.53]))


@pytest.mark.parametrize(("width", "rank", "gain"), [(64, 32, 0.1), (16, 32, 0.1 * math.sqrt(2))])
def test_second_matrix_starts_orthogonal(width, rank, gain):
    weight = torch.empty(width, rank)
    value_residual.reset_gate2(weight)
    short = weight.t() if width > rank else weight
    torch.testing.assert_close(short @ short.t(), gain**2 * torch.eye(short.shape[0]), atol=1e-6, rtol=0)


def test_refuses_other_widths():
    KVM = mixer_class("kvm")
    layer = KVM(KVM.Options(num_heads=2), Site(32, layer=5, num_layers=6, first_of_kind=False))
    x = torch.zeros(1, 1, 32)
    context = Context.of(x, first_values={"kvm": torch.zeros(1, 1, 64)})
    with pytest.raises(LayerError, match=r"layer 5 \(kvm\) has values of width 32, .* of width 64"):
        layer(x, context)
