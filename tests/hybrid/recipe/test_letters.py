"""What letters mean: kinds, options from defaults and letters, and what does not fit."""

import dataclasses

import pytest

from hybrid.recipe import Recipe, RecipeError, check, layer_specs, load, save
from hybrid.recipe.schema import ModelSection, OptimizerSection, TrainSection

from ..two_kinds import SlotOptions, WideOptions, refused

pytestmark = pytest.mark.usefixtures("two_kinds")


def test_a_pattern_fault_shows_the_caret(base):
    """huggingface/transformers#45300"""
    (problem,) = refused(base, "model.pattern=KK?F")
    assert problem.split("\n")[1:] == ["  KK?F", "    ^"]
    (problem,) = refused(base, "model.pattern=KZ")
    assert "unknown letter 'Z' at position 2" in problem
    assert load(base, ["model.pattern= K 2\tF\n"]).model.expanded == ["K", "K", "F"]


def test_a_letter_whose_kind_is_not_there_names_those_that_are(base):
    (problem,) = refused(base, "model.pattern=KR")
    key, what = problem.split(": ", 1)
    assert key == "model.layers.R (base.yaml:1)"
    assert what == "kind 'rwkv7' is not available; available: full (letter F), kvm (letter K)"


def test_options_come_from_defaults_then_from_the_letter(write, base):
    path = write(
        "base: base.yaml\n"
        "model:\n"
        "  pattern: KXF\n"
        "  defaults: {chunk: 16, num_heads: 8}\n"
        "  layers:\n"
        "    X: {kind: kvm, chunk: 128, exponent: 1e-1, sizes: [1, 2]}\n"
    )
    recipe = load(path, ["model.layers.F.num_heads=2"])
    specs = layer_specs(recipe.model)
    assert [(spec.letter, spec.kind) for spec in specs] == [("K", "kvm"), ("X", "kvm"), ("F", "full")]
    assert specs[0].options == SlotOptions(chunk=16, num_heads=8)
    assert specs[1].options == SlotOptions(chunk=128, num_heads=8, exponent=0.1, sizes=[1, 2])
    assert specs[2].options == WideOptions(num_heads=2)
    assert load(path, ["model.pattern=F", "model.defaults.num_heads=16"]).model.expanded == ["F"]


def test_a_default_given_in_vain_on_the_command_line_is_refused(base, tmp_path):
    saved = tmp_path / "saved.yaml"
    save(load(base), saved)
    (problem,) = refused(saved, "model.defaults.chunk=16")
    assert "has no effect" in problem
    assert "model.layers.K.chunk" in problem
    assert load(saved, ["model.layers.K.chunk=16"]).model.layers["K"]["chunk"] == 16


def test_layers_that_share_values_must_be_equally_wide(base):
    (problem,) = refused(
        base, "model.pattern=KX", "model.layers.K.num_heads=2", "model.layers.X={kind: kvm, num_heads: 4}"
    )
    assert problem.startswith("model.layers.X")
    assert "4 wide" in problem


def test_sections_made_in_code_work_like_loaded_ones():
    model = ModelSection(pattern="K2F", hidden_size=32, layers={"K": {"chunk": 8}})
    assert [spec.letter for spec in layer_specs(model)] == ["K", "K", "F"]
    with pytest.raises(RecipeError, match="kvm has no option 'chunks'"):
        layer_specs(dataclasses.replace(model, layers={"K": {"chunks": 8}}))
    recipe = Recipe(
        model=model,
        optimizer=OptimizerSection(lr=1e-3),
        train=TrainSection(output="x", steps=1, batch_size=6),
    )
    with pytest.raises(RecipeError) as caught:
        check(recipe)
    assert caught.value.problems == [
        "data.folder: needs a value: text",
        "data.sources: needs at least one source, such as {text: {paths: [my_texts/]}}",
    ]
