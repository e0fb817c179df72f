"""LayerNorm and RMSNorm."""

import pytest
import torch

from hybrid.layers import LayerError
from hybrid.layers.norms import make_norm


def filled(kind, dtype=torch.float32):
    norm = make_norm(kind, 16, 1e-5)
    torch.manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm.to(dtype)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_matches_the_formula(kind):
    norm = filled(kind, torch.float64)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    if kind == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    else:
        expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_low_precision_input_is_computed_in_fp32_and_rounded_once(kind, weights):
    norm = filled(kind, weights)
    x = (torch.randn(3, 5, 16) * 3 + 40).bfloat16()
    found = norm(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, norm.float()(x.float()).bfloat16())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_fp32_input_with_bf16_weights_stays_fp32(kind):
    assert filled(kind, torch.bfloat16)(torch.randn(2, 16)).dtype == torch.float32


def test_unknown_kind_names_what_is_allowed():
    with pytest.raises(LayerError, match="norm 'batchnorm': allowed are layernorm, rmsnorm"):
        make_norm("batchnorm", 4)
