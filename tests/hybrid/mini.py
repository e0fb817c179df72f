"""The small model of these tests: one layer each of KVM, RWKV-7, sliding window and full
attention, hidden 64 with 4 heads and 2 KV heads, window 32, KVM chunk 16, vocabulary 320."""

import torch

from hybrid.model import HybridLM
from hybrid.recipe.letters import layer_specs
from hybrid.recipe.schema import ModelSection

EQUAL = 1e-4
"""Largest difference of fp32 logits that counts as rounding."""


def section(pattern="KRWF", **changes) -> ModelSection:
    defaults = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "window": 32,
        "chunk": 16,
        "window_chunks": 2,
        "budget_minimum": 16,
        "budget_factor": 4.0,
    }
    values = {"pattern": pattern, "hidden_size": 64, "vocab_size": 320, "defaults": defaults}
    return ModelSection(**{**values, **changes})


def build(model: ModelSection) -> HybridLM:
    return HybridLM(model, layer_specs(model))


def mini(pattern="KRWF", seed=0, **changes) -> HybridLM:
    """A model whose every parameter is random: the paper's zero output projections would make the layers
    do nothing."""
    torch.manual_seed(seed)
    model = build(section(pattern, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    return model


def ids(count, batch=1, seed=0, vocab=320):
    return torch.randint(vocab, (batch, count), generator=torch.Generator().manual_seed(seed))


def difference(one, other):
    return (one.float() - other.float()).abs().max().item()


def borders(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
