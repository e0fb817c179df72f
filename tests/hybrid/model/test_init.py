"""How parameters start: the paper's values, by their statistics."""

import math

import pytest
import torch

from hybrid.model import ModelError

from ..mini import build, section

LAYERS = 6


@pytest.fixture(scope="module")
def paper():
    torch.manual_seed(0)
    return build(section(f"F{LAYERS}", vocab_size=1024, hidden_size=128))


def test_embeddings_are_tiny_and_uniform(paper):
    weight = paper.embedding.weight
    assert weight.abs().max() <= 1e-4
    assert weight.std().item() == pytest.approx(1e-4 / math.sqrt(3), rel=0.02)


def test_the_head_is_orthogonal_with_its_gain(paper):
    weight = paper.head.weight
    gain = 0.5 * math.sqrt(1024 / 128)
    assert torch.allclose(weight.T @ weight, gain**2 * torch.eye(128), atol=1e-4)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_feed_forwards_start_orthogonal_with_zero_output(paper, layer):
    ffn = paper.blocks[layer].ffn
    assert ffn.c_fc.weight.shape == (512, 128)
    assert torch.allclose(ffn.c_fc.weight.T @ ffn.c_fc.weight, torch.eye(128), atol=1e-5)
    assert ffn.c_proj.weight.eq(0).all()
    power = (1 - layer / LAYERS) ** 4
    expected = torch.tensor([1 - (i / 128) ** power for i in range(128)])
    assert torch.allclose(ffn.x_k, expected, atol=1e-6)


def test_norms_start_as_the_identity(paper):
    for name, parameter in paper.named_parameters():
        if "norm" in name:
            assert parameter.eq(1.0 if name.endswith("weight") else 0.0).all(), name


def test_blocks_start_as_the_identity(paper):
    ids = torch.arange(20)[None]
    embedded = paper.embedding_norm(paper.embedding(ids))
    logits, _ = paper(ids)
    assert torch.equal(logits, paper.head(paper.norm(embedded)))


def test_normal_gives_every_matrix_the_same_spread_and_biases_zero():
    torch.manual_seed(0)
    defaults = {"num_heads": 4, "qkv_bias": True}
    model = build(section("F2", init="normal", feed_forward="swiglu", hidden_size=128, defaults=defaults))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name


def test_the_seed_decides_and_resetting_repeats_it():
    torch.manual_seed(3)
    one = build(section())
    torch.manual_seed(3)
    one.reset_parameters()
    first = {name: p.clone() for name, p in one.named_parameters()}
    torch.manual_seed(3)
    one.reset_parameters()
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, first[name]), name
    torch.manual_seed(4)
    one.reset_parameters()
    assert not torch.equal(one.head.weight, first["head.weight"])


def test_every_parameter_is_reset_after_meta_construction():
    with torch.device("meta"):
        model = build(section("KRWFB", norm="rmsnorm", feed_forward="gelu"))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)  # what to_empty leaves may be anything
    torch.manual_seed(5)
    model.reset_parameters()
    direct = build(section("KRWFB", norm="rmsnorm", feed_forward="gelu"))
    torch.manual_seed(5)
    direct.reset_parameters()
    for (name, one), other in zip(model.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_an_unknown_initialisation_is_refused():
    with pytest.raises(ModelError, match=r"model\.init is 'xavier'; allowed: paper, normal"):
        build(section(init="xavier"))
