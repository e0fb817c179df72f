"""Recipes with the real layers: letters of one's own, and options that cannot be built."""

import pytest
import torch

from hybrid.model import HybridLM
from hybrid.recipe import RecipeError, load

BASE = """\
model:
  pattern: (KS)2F
  hidden_size: 64
  vocab_size: 320
  defaults: {num_heads: 4, chunk: 16}
  layers:
    K: {budget: fixed, budget_minimum: 16}
    S: {kind: kvm, budget: saturation, budget_saturation: 40, budget_minimum: 1}
data: {folder: data, sources: {text: {paths: [text]}}}
optimizer: {lr: 1e-3}
train: {output: out, steps: 1, batch_size: 1}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.yaml").write_text(BASE)
    return tmp_path / "mine.yaml"


def test_two_letters_of_one_kind_have_budgets_of_their_own(path):
    with torch.device("meta"):
        model = HybridLM.from_recipe(load(path))
    kinds = [block.mixer.kind for block in model.blocks]
    assert kinds == ["kvm", "kvm", "kvm", "kvm", "full"]
    # After 62 updates of 16 tokens 1008 tokens have been absorbed; 40 t / (40 + t) at t = 1024 is 38.5.
    assert [block.mixer.spec.slots_after(62) for block in model.blocks[:4]] == [16, 38, 16, 38]


def test_impossible_layers_are_all_listed_before_anything_is_built(path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    wrong = [
        "model.layers.K.budget_minimum=0",
        "model.layers.S.sinks=17",
        "model.layers.F.rotary_dim=7",
        "model.layers.N={kind: kvm, budget: fixed, budget_minimum: 16, sinks: 16}",
        "model.layers.P={kind: kvm, head_dim: 8, rotary_dim: 8}",
        "train.batch_size=0",
    ]
    with pytest.raises(RecipeError) as error:
        load(path, wrong)
    listed = str(error.value)
    assert "has 6 problems" in listed
    for words in (
        "budget_minimum is 0; allowed: a whole number of 1 or more",
        "sinks is 17; allowed: a whole number from 0 to chunk (16)",
        "rotary_dim is 7; allowed: an even number",
        "rotary_dim is 8; allowed: even numbers above 0 and below head_dim 8",
        "sinks is 16, all slots of the first state (chunk 16)",
        "train.batch_size (command line): is 0; allowed: 1 or more",
    ):
        assert words in listed


def test_heads_that_cannot_be_shared_out_over_ranks_are_refused(path, monkeypatch):
    """verl-project/verl#1226: heads, length and ranks are named, nothing is built. KVM hands its state on."""
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    with pytest.raises(RecipeError) as error:
        load(path, ["parallel.sequence=8", "data.context=96", "model.layers.F.num_kv_heads=2"])
    listed = str(error.value)
    has = "layer 4 (full) has 4 query heads and 2 key/value heads, for 96 tokens"
    assert f"8 ranks per sequence: {has} sharded over 8 ranks: 4 query heads cannot" in listed
    assert "(kvm)" not in listed
    monkeypatch.undo()
    assert load(path, ["parallel.sequence=4", "model.layers.F.num_kv_heads=2"]).parallel.sequence == 4
