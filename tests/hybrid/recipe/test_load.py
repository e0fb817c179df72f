"""Whole recipes: references, unknown keys, all problems at once, saving."""

import dataclasses
import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid.recipe import load, save

from ..two_kinds import BASE, SlotOptions, refused

pytestmark = pytest.mark.usefixtures("two_kinds")


def test_all_open_unresolvable_and_circular_values_are_listed_together(write):
    """omry/omegaconf#1175, #1263, #442"""
    path = write(
        "model:\n  pattern: K\n  hidden_size: ${train.stepz}\n"
        "data: {folder: '???', sources: {a: {weight: 1}}}\n"
        "optimizer: {lr: '${optimizer.eps}', eps: '${optimizer.lr}'}\n"
        "train: {steps: 5, output: 'runs/${data.folder}'}\n"
    )
    problems = refused(path)
    assert problems[:4] == [
        "model.hidden_size (mine.yaml:3): '${train.stepz}' refers to a key that does not exist",
        "optimizer.lr (mine.yaml:5): '${optimizer.eps}' refers to itself in a circle",
        "optimizer.eps (mine.yaml:5): '${optimizer.lr}' refers to itself in a circle",
        "train.output (mine.yaml:6): 'runs/${data.folder}' refers to a key without a value",
    ]
    assert sorted(problems[4:]) == [
        "data.folder (mine.yaml:4): needs a value: text",
        "data.sources.a.paths (mine.yaml:4): needs a value: a list of texts",
        "train.batch_size (mine.yaml:6): needs a value: a whole number",
    ]


def test_references_take_types_from_where_they_stand(base):
    recipe = load(
        base,
        [
            "train.output=runs/${model.hidden_size}-${optimizer.lr}",
            "data.vocab_size=${data.context}",
            "model.layers.K.chunk=${model.hidden_size}",
            r"train.prompts=['echo \${HOME}', a]",
        ],
    )
    assert recipe.train.output == "runs/32-1e-3"
    assert recipe.data.vocab_size == 1024
    assert recipe.model.layers["K"]["chunk"] == 32
    assert recipe.train.prompts == ["echo ${HOME}", "a"]


def test_a_table_that_refers_to_itself_is_refused(write, base):
    path = write("base: base.yaml\nmodel:\n  layers: {K: '${model.layers}'}\n")
    assert any("in a circle" in problem for problem in refused(path))
    problems = refused(base, "model.layers.K=${data.sources}", "data.sources.code=${model.layers}")
    assert any("in a circle" in problem for problem in problems)
    problems = refused(
        base, "train.prompts=['${data.sources.code.paths}']", "data.sources.code.paths=['${train.prompts}']"
    )
    assert any("in a circle" in problem for problem in problems)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rte=1", "unknown key; did you mean optimizer.lr?"),
        ("model.patern=K", "unknown key; did you mean model.pattern?"),
        ("trian.steps=1", "unknown key; did you mean train?"),
        ("data.sources.code.pathz=[a]", "unknown key; did you mean data.sources.code.paths?"),
        ("train.weight_decay=0", "unknown key; did you mean optimizer.weight_decay?"),
        ("model.layers.K.chnk=3", "kvm has no option 'chnk'; did you mean chunk?"),
        ("model.defaults.num_head=3", "no kind of layer has this option; did you mean num_heads?"),
        ("model.layers.k.chunk=3", "a layer letter is one of A-Z"),
        ("model.layers.K=kvm", "expected a table such as {kind: kvm, chunk: 256}"),
        ("train=5", "expected a table of keys, found '5'"),
        ("train.steps=null", "needs a value: a whole number"),
        ("train.steps=", "needs a value: a whole number"),
        ("base=x.yaml", "a base can only be named in a recipe file"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(base, override, words):
    """omry/omegaconf#689"""
    (problem,) = refused(base, override)
    assert problem.startswith(("override", override[:5]))
    assert "command line" in problem or "override" in problem
    assert words in problem


def test_an_old_key_is_refused_with_its_new_name(base, write):
    renamed = "was renamed train.tbptt_chunks"
    assert refused(base, "train.carry_chunks=2") == [f"train.carry_chunks (command line): {renamed}"]
    saved = write("base: base.yaml\ntrain:\n  carry_chunks: 1\n")
    assert load(saved, saved=True).train.tbptt_chunks == 1  # what an earlier version wrote into its run
    path = write("base: base.yaml\ntrain:\n  carry_chunks: 2\n")
    assert refused(path) == [f"train.carry_chunks (mine.yaml:3): {renamed}"]


@pytest.mark.parametrize(
    "reference", ["${oc.env:HOME}", "${oc.decode:'1'}", "${a b}", "${", "${.steps}", "x${a"]
)
def test_only_plain_references_are_understood(base, reference):
    (problem,) = refused(base, f"train.output={reference}")
    assert problem.startswith("train.output (command line): ")
    assert "is not a reference" in problem


def test_a_reference_to_the_environment_is_not_looked_up(write, monkeypatch):
    monkeypatch.setenv("SECRET", "tops3cret")
    problems = refused(write(BASE + "monitor: {peak_tflops: '${oc.env:SECRET}'}\n"))
    assert len(problems) == 1
    assert "tops3cret" not in problems[0]


def test_everything_wrong_is_listed_at_once(base):
    problems = refused(
        base,
        "train.stepz=3",
        "optimizer.lr=fast",
        "train.precision=fp16",
        "train.micro_batch_size=3",
        "parallel.sequence=3",
        "model.layers.K.chunk=0",
        "model.layers.F.nose=1",
        "model.depth=7",
        world_size=4,
    )
    keys = {problem.split(" ")[0].rstrip(":") for problem in problems}
    assert keys == {
        "train.stepz",
        "optimizer.lr",
        "train.precision",
        "parallel.sequence",
        "model.layers.K",
        "model.layers.F.nose",
        "model.depth",
    }


def test_a_saved_recipe_holds_pattern_list_and_table_that_agree(base, tmp_path):
    """NVIDIA/Model-Optimizer#1377: read by plain YAML and JSON readers."""
    recipe = load(base, ["model.layers.K.chunk=128"])
    for name, read in (("saved.yaml", yaml.safe_load), ("saved.json", json.loads)):
        save(recipe, tmp_path / name)
        model = read((tmp_path / name).read_text())["model"]
        assert model["pattern"] == "K2F"
        assert model["depth"] == 3
        assert model["expanded"] == ["K", "K", "F"]
        assert model["layers"]["K"] == {"kind": "kvm", **dataclasses.asdict(SlotOptions(chunk=128))}
        assert model["layers"]["F"] == {"kind": "full", "num_heads": 4}
        assert load(tmp_path / name) == recipe
    for pattern in ("K4F", "F3"):
        problems = refused(tmp_path / "saved.yaml", f"model.pattern={pattern}")
        assert any("model.expanded" in p and "lists 3 layers (K K F)" in p for p in problems)
    changed = load(tmp_path / "saved.yaml", ["model.pattern=K4F", "model.depth=null", "model.expanded=null"])
    assert changed.model.depth == 5


@settings(derandomize=True, max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(st.characters(codec="utf-8")), max_size=3), st.text("${}\\'\":,a0. \n", min_size=1))
def test_any_text_survives_saving(base, prompts, output):
    recipe = load(base)
    recipe.train.prompts, recipe.train.output = prompts, output
    for name in ("texts.yaml", "texts.json"):
        save(recipe, base.with_name(name))
        assert load(base.with_name(name)) == recipe


def test_recipes_are_listed_as_equal_only_when_they_are(base):
    assert load(base) == load(base)
    assert load(base) != load(base, ["train.seed=1"])


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("model.hidden_size", "a whole number"),
        ("model.layers.K.chunk", "a whole number"),
        ("model.layers.K.label", "text"),
        ("optimizer.betas", "a list of numbers"),
        ("data.tokenizer", "text or null"),
    ],
)
def test_any_key_left_open_is_refused(base, key, kind):
    """omry/omegaconf#1263: also one that has a default, which must not be taken in silence."""
    (problem,) = refused(base, f"{key}=???")
    assert problem == f"{key} (command line): needs a value: {kind}"
