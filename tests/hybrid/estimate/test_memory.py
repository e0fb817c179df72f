"""The estimate of memory, by hand for each ZeRO stage, and against what blocks really keep."""

import pytest
import torch

from hybrid.estimate.info import meta_model
from hybrid.estimate.memory import memory_estimate
from hybrid.layers import Context
from hybrid.model import HybridLM
from hybrid.recipe import batch_geometry, load

SMALL = """\
model: {pattern: FW, hidden_size: 64, vocab_size: 320, layers: {W: {window: 24}}, defaults: {num_heads: 2}}
data: {folder: data, sources: {text: {paths: [text.txt]}}, context: 128}
optimizer: {lr: 1e-3}
train: {output: run, steps: 50, batch_size: 8, micro_batch_size: 2}
"""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    return load(tmp_path / "small.yaml")


def estimate(recipe, processes: int, stage: int):
    return memory_estimate(meta_model(recipe), recipe, batch_geometry(recipe, processes), stage)


def test_what_each_zero_stage_shares(small):
    count = sum(meta_model(small).parameter_parts().values())
    w = 4 * count
    assert [estimate(small, 4, stage)[:4] for stage in range(4)] == [
        (w, w, 2 * w, w),
        (w, w / 4, 3 * w / 4, w),
        (w, w / 4, 3 * w / 4, w),
        (w / 4, w / 4, 3 * w / 4, 2 * w),
    ]
    # with two micro-batches the gradient of the first waits whole at stage 1
    assert estimate(small, 2, 1).gradients == w
    assert estimate(small, 1, 1).buffers == 0
    small.train.precision = "bf16"
    assert estimate(small, 4, 1)[:4] == (w / 2, w, 3 * w / 4, w / 2)
    small.optimizer.name = "sgd"
    assert estimate(small, 4, 1).optimizer == w / 4


def test_activations_and_logits(small):
    tokens = 2 * 128
    whole = estimate(small, 1, 1)
    block = 19.5 * 64 + 2 * 256
    assert whole.activations == 4 * tokens * 2 * block
    assert whole.logits == 2 * 4 * tokens * 320
    small.train.activation_checkpointing = True
    assert estimate(small, 1, 1).activations == 4 * tokens * (2 * 64 + block)
    small.train.loss_chunk = 32
    assert estimate(small, 1, 1).logits == 2 * 4 * 32 * 320


HEADS = ["model.defaults={num_heads: 4, head_dim: 64, chunk: 64}"]
KINDS = {
    "F": HEADS,
    "W": [*HEADS, "model.layers.W.window=64"],
    "B": HEADS,
    "K": [*HEADS, "model.layers.K.budget_minimum=64"],
    "Q": HEADS,
    "R": HEADS,
    "G": HEADS,
    "D": HEADS,
    "M": ["model.layers.M={kind: mamba2, num_heads: 8, head_dim: 64}"],
}
"""Letter -> what its layer needs at width 256, in chunks of 64."""


def kept_bytes(block, x) -> int:
    """Bytes of all tensors that autograd keeps of a block's forward pass, its weights left out."""
    seen = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = block(x, x, Context.of(x, want_state=False))
    assert kept[0].requires_grad
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("feed_forward", ["relu2", "swiglu"])
@pytest.mark.parametrize("letter", KINDS)
def test_a_block_keeps_what_is_estimated_within_a_fifth(letter, feed_forward):
    changes = [f"model.pattern={letter}", f"model.feed_forward={feed_forward}", "data.context=256"]
    size = ["model.hidden_size=256", "train.batch_size=1"]
    recipe = load("debug", [*changes, *size, *KINDS[letter]])
    recipe.model.vocab_size = 64
    torch.manual_seed(0)
    model = HybridLM.from_recipe(recipe)
    found = kept_bytes(model.blocks[0], torch.randn(1, 256, 256, requires_grad=True))
    assert found == pytest.approx(estimate(recipe, 1, 1).activations, rel=0.2)
