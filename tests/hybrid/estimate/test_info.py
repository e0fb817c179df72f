"""`hybrid info` on every shipped recipe, and its numbers against hand computation for a small one."""

import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hybrid.estimate.info import CONTEXTS, describe, flops, layer_table, meta_model, size
from hybrid.estimate.plot import LENGTHS, PlotError, curves, draw
from hybrid.layers.norms import NORMS
from hybrid.model.block import FEED_FORWARDS
from hybrid.model.init import INITS
from hybrid.recipe import RecipeError, layer_specs, load, save, shipped, to_yaml
from hybrid.recipe.schema import ModelSection

ROOT = Path(__file__).parents[3]
SMALL = """\
model:
  pattern: WFW
  hidden_size: 64
  vocab_size: 320
  ffn_token_shift: false
  layers: {W: {kind: sliding_window, window: 24}}
  defaults: {num_heads: 2, token_shift: false, value_residual: false}
data: {folder: data, sources: {text: {paths: [text.txt]}}, context: 128}
optimizer: {lr: 1e-3}
train: {output: run, steps: 50, batch_size: 8, micro_batch_size: 2}
"""

# One mixer: q, k, v and output maps of 64 x 64, two norms of 32 weights and 32 biases
MIXER = 4 * 64 * 64 + 2 * 2 * 32
FFN = 2 * 64 * 256
NORM = 2 * 64
TOTAL = 2 * 320 * 64 + 3 * (MIXER + FFN) + (2 + 2 * 3) * NORM
# 2 FLOPs per multiply-add of one token through all matrices but the embedding
MATRICES = 2 * (3 * (4 * 64 * 64 + FFN) + 320 * 64)
PER_KEY = 2 * 2 * 64  # query-key products and weighted values, both heads


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    return load(tmp_path / "small.yaml")


def test_parameters_by_part(small):
    assert meta_model(small).parameter_parts() == {
        "embedding": 320 * 64,
        "mixer sliding_window": 2 * MIXER,
        "mixer full": MIXER,
        "feed-forward": 3 * FFN,
        "norms": 8 * NORM,
        "head": 320 * 64,
    }
    assert f"{TOTAL:,}" in describe(small)


@pytest.mark.parametrize("length", CONTEXTS.values())
def test_flops_and_state_at_each_context(small, length):
    model = meta_model(small)
    assert model.flops_at(length - 1).forward == MATRICES + PER_KEY * (length + 2 * 24)
    window = (24 * 25 / 2 + (length - 24) * 24) / length
    mean = MATRICES + PER_KEY * ((length + 1) / 2 + 2 * window)
    assert model.flops_per_token(length).training == pytest.approx(3 * mean, rel=1e-12)
    # a sliding window keeps what the next token can see beside itself
    assert model.state_bytes(length, 4) == 4 * 2 * 64 * (length + 2 * 23)
    assert model.state_bytes(length, 2) == 2 * 2 * 64 * (length + 2 * 23)


def test_the_report_shows_these_numbers(small):
    lines = [" ".join(line.split()) for line in describe(small, 2).splitlines()]
    assert lines[0] == "3 layers: WFW"
    assert "W sliding_window 2 0, 2 num_heads=2 token_shift=False value_residual=False window=24" in lines
    assert "F full 1 1 num_heads=2 token_shift=False value_residual=False" in lines
    decode = MATRICES + PER_KEY * (8192 + 48)
    assert any(line.startswith("8k ") and f"{decode / 1e6:.3g} M" in line for line in lines)
    assert any(
        line.startswith("1k ") and f"{4 * 2 * 64 * (1024 + 46) / 1024:.4g} KiB" in line for line in lines
    )
    assert "2 processes / 1 per sequence = 2 data-parallel" in lines
    assert "8 sequences = 2 data-parallel x 2 micro-batch x 2 accumulation" in lines
    assert "8 sequences x 128 tokens = 1,024 tokens a step" in lines
    assert any(line.startswith("1,024 x 50 steps = 51,200 tokens") for line in lines)


@pytest.mark.parametrize(("boundaries", "rows"), [("respect", 1), ("cross", 2)])
def test_what_ranks_that_share_a_sequence_send(small, boundaries, rows):
    """By hand: per token the other rank's head of q, k, v and of the output, or of the window the keys and
    values before a chunk; and a token of shift a row."""
    small.parallel.sequence, small.data.boundaries, small.model.ffn_token_shift = 2, boundaries, True
    shift, heads = rows * 64 * 4, 2 * 128 * 4 * 32 * 4
    lines = [" ".join(line.split()) for line in describe(small, 2).splitlines()]
    full, window = shift + heads, shift + rows * 23 * 2 * 64 * 4
    steps = 2 * 4  # forward and backward, 4 micro-batches
    assert f"W sliding_window 2 {window:,} B {steps * window:,} B {2 * steps * window:,} B" in lines
    assert f"F full 1 {full:,} B {steps * full:,} B {steps * full:,} B" in lines
    small.train.activation_checkpointing = True
    assert f"total 3 {3 * 4 * (full + 2 * window):,} B" in [
        " ".join(line.split()) for line in describe(small, 2).splitlines()
    ]


def test_an_open_vocabulary_is_taken_from_the_data_and_said_to_be(small):
    small.model.vocab_size, small.data.vocab_size = None, 1000
    text = describe(small)
    assert "vocabulary of 1,024 (from data.vocab_size; the tokenizer decides)" in text
    assert small.model.vocab_size is None


def test_a_batch_that_does_not_divide_is_refused(small):
    with pytest.raises(RecipeError, match="3 x 2 = 6"):
        describe(small, 3)


def test_layers_far_apart_share_a_row(small):
    small.model.pattern, small.model.depth, small.model.expanded = "(W2F)20", None, None
    text = layer_table(layer_specs(small.model))
    assert text.splitlines()[0] == "60 layers: (W2F)20"
    assert "2, 5, 8, 11, 14, ..., 59" in text


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_loads_is_described_and_survives_saving(name, tmp_path):
    recipe = load(name)
    text = describe(recipe, recipe.train.batch_size // (recipe.train.micro_batch_size or 1))
    assert f"{recipe.model.depth} layers" in text
    save(recipe, tmp_path / "again.yaml")
    assert load(tmp_path / "again.yaml") == recipe
    assert recipe.train.output.endswith(name.removeprefix("paper/"))
    assert to_yaml(recipe).count("kind:") == len(set(recipe.model.expanded) | set(recipe.model.layers))


@pytest.mark.parametrize(
    ("name", "parameters", "letters"),
    [
        ("paper/kvm_fixed256_120m", 163e6, "K" * 12),
        ("paper/kvm_sqrt16_350m", 407e6, "K" * 24),
        ("paper/kvm_swa_saturate1024_120m", 163e6, "WK" * 6),
    ],
)
def test_paper_recipes_have_the_papers_sizes(name, parameters, letters):
    recipe = load(name)
    assert "".join(recipe.model.expanded) == letters
    # the paper counts without the embedding: 120M and 350M
    assert sum(meta_model(recipe).parameter_parts().values()) == pytest.approx(parameters, rel=0.01)
    assert recipe.train.batch_size * recipe.data.context == 524288


def test_allowed_words_are_those_of_the_code():
    choices = {
        field.name: field.metadata["bounds"].choices for field in fields(ModelSection) if field.metadata
    }
    assert choices["feed_forward"] == tuple(FEED_FORWARDS)
    assert set(choices["norm"]) == set(NORMS)
    assert set(choices["init"]) == set(INITS)


# The plot, and the page that shows one


def test_curves_are_one_layers_costs_by_letter(small):
    full, window = sorted(curves(small), key=lambda curve: curve.letter)
    assert (full.letter, full.kind, window.letter, window.kind) == ("F", "full", "W", "sliding_window")
    maps = 2 * 4 * 64 * 64
    assert full.state_bytes == [4 * 2 * 64 * length for length in LENGTHS]
    assert full.flops == pytest.approx([maps + PER_KEY * (length + 1) / 2 for length in LENGTHS], rel=1e-12)
    assert window.state_bytes == [4 * 2 * 64 * 23] * len(LENGTHS)
    assert window.flops[-1] == pytest.approx(maps + PER_KEY * 24, rel=1e-4)


def test_a_plot_is_drawn(small, tmp_path):
    draw(small, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_told(small, tmp_path, monkeypatch):
    with pytest.raises(PlotError, match=r"plot\.xyz: the name must end in \.png \(or"):
        draw(small, tmp_path / "plot.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"drawing plot\.png needs matplotlib: pip install matplotlib"):
        draw(small, tmp_path / "plot.png")
    assert not list(tmp_path.glob("plot*"))


def test_the_page_about_layers_has_the_numbers_of_its_own_command(tmp_path):
    page = (ROOT / "docs" / "layers.md").read_text()
    (command,) = [line for line in page.splitlines() if line.startswith("hybrid info ")]
    _, _, recipe, *overrides = shlex.split(command)
    assert overrides[-2:] == ["--plot", "docs/layers.png"]
    found = curves(load(recipe, overrides[:-2]))
    assert [curve.letter for curve in found] == list("FWBKQRGDM")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if "iB |" in line
    ]
    for curve, (letter, _, state, *work) in zip(found, rows, strict=True):
        at = [LENGTHS.index(length) for length in (1024, 64 * 1024, 1024 * 1024)]
        assert letter == curve.letter
        assert state == size(curve.state_bytes[at[1]])
        assert work == [flops(curve.flops[i]) for i in at]
