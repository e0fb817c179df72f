"""Recipes: numbers, merging, references, refusals (all at once), the layer table, saving."""

import dataclasses
import json
from typing import Literal

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid import layers
from hybrid.layers import LayerError, Mixer
from hybrid.recipe import (
    Geometry,
    Recipe,
    RecipeError,
    batch_geometry,
    check,
    layer_specs,
    load,
    save,
    to_yaml,
)
from hybrid.schema import ModelSection, OptimizerSection, TrainSection

BASE = """\
model: {pattern: K2F, hidden_size: 32}
data:
  folder: runs/data
  sources:
    code: {paths: ["stdlib:"]}
    books: {paths: ["bible:"], weight: 0.5}
optimizer: {lr: 1e-3}
train: {steps: 10, batch_size: 8, output: runs/out}
"""


@dataclasses.dataclass
class SlotOptions:
    chunk: int = 64
    exponent: float = 0.5
    num_heads: int | None = None
    budget: Literal["fixed", "power_law"] = "fixed"
    label: str = ""
    sizes: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.chunk < 1:
            raise LayerError(f"chunk is {self.chunk}; allowed: 1 or more")


@dataclasses.dataclass
class WideOptions:
    num_heads: int = 4


class Slots(Mixer):
    kind = "kvm"
    Options = SlotOptions

    @classmethod
    def value_width(cls, options, site):
        return options.num_heads

    @classmethod
    def check_cut(cls, options, site, size, tokens):
        pass


class Wide(Mixer):
    kind = "full"
    Options = WideOptions

    @classmethod
    def check(cls, options, site):
        if site.hidden_size % options.num_heads:
            raise LayerError(
                f"hidden_size {site.hidden_size} is no multiple of num_heads {options.num_heads}"
            )

    @classmethod
    def check_cut(cls, options, site, size, tokens):
        if options.num_heads % size:
            raise LayerError(f"layer {site.layer} has {options.num_heads} heads for {tokens} tokens")


@pytest.fixture(autouse=True)
def two_kinds(monkeypatch):
    """Two kinds with known options, so that these tests are about recipes and not about our mixers."""
    kinds = {"full": Wide, "kvm": Slots}
    monkeypatch.setattr(layers, "kinds", lambda: kinds)
    monkeypatch.setattr(layers, "mixer_class", kinds.__getitem__)


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def base(write):
    return write(BASE, "base.yaml")


def refused(path, *overrides, **more):
    with pytest.raises(RecipeError) as caught:
        load(path, overrides, **more)
    return caught.value.problems


NUMBERS = [
    ("1e-4", 1e-4),
    ("1E-4", 1e-4),
    ("1.e-4", 1e-4),
    (".1e-3", 1e-4),
    ("1e+2", 100.0),
    ("'1e-4'", 1e-4),
]


@pytest.mark.parametrize(
    ("written", "value"), [*NUMBERS, ('"1e-4"', 1e-4), ("3", 3.0), ("+2.5", 2.5), ("1_000", 1e3)]
)
def test_numbers_are_floats_in_files_and_overrides(write, base, written, value):
    """T058: also the printed configuration shows a number."""
    in_file = load(write(f"base: base.yaml\noptimizer:\n  lr: {written}\n"))
    overridden = load(base, [f"optimizer.lr={written}"])
    for recipe in (in_file, overridden):
        assert type(recipe.optimizer.lr) is float
        assert recipe.optimizer.lr == value
        assert type(yaml.safe_load(to_yaml(recipe))["optimizer"]["lr"]) is float


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.0e-4", "0.1e-3", '"1e-4"', '".1e-3"'])
def test_numbers_are_floats_in_json(write, base, written):
    """T058"""
    path = write('{"base": "base.yaml", "optimizer": {"lr": %s}}' % written, "mine.json")  # noqa: UP031
    assert load(path).optimizer.lr == 1e-4


@pytest.mark.parametrize(
    "written", ["abc", "1e", "0x10", "1,5", "nan", "inf", "1e999", "true", "[1]", "{a: 1}", "٣"]
)
def test_other_texts_for_a_number_are_refused_with_the_key(base, written):
    """T058"""
    (problem,) = refused(base, f"optimizer.lr={written}")
    assert problem.startswith("optimizer.lr (command line): expected a")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("train.output", "007"),
        ("train.output", "1e5"),
        ("train.output", "yes"),
        ("train.resume", "step_00000100"),
        ("train.resume", "100"),
        ("model.layers.K.label", "1e-4"),
        ("model.layers.K.label", "true"),
    ],
)
def test_text_that_looks_like_something_else_stays_text(write, base, key, text):
    """T058"""
    *sections, name = key.split(".")
    lines = ["base: base.yaml", *(" " * i + f"{s}:" for i, s in enumerate(sections)), f"    {name}: {text}"]
    for recipe in (load(write("\n".join(lines))), load(base, [f"{key}={text}"])):
        value = recipe
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        assert value == text
        saved = write(to_yaml(recipe), "saved.yaml")
        assert load(saved) == recipe
        assert yaml.safe_load(saved.read_text())["train"]["output"] == recipe.train.output


def test_whole_numbers_and_truth_values_are_not_mixed_up(base):
    problems = refused(
        base,
        "train.steps=1.5",
        "train.batch_size=true",
        "train.seed=1e3",
        "monitor.tensorboard=1",
        "train.compile=maybe",
    )
    assert problems == [
        "train.steps (command line): expected a whole number, found '1.5'",
        "train.batch_size (command line): expected a whole number, found 'true'",
        "train.seed (command line): expected a whole number, found '1e3'",
        "train.compile (command line): expected true or false, found 'maybe'",
        "monitor.tensorboard (command line): expected true or false, found '1'",
    ]
    assert load(base, ["train.compile=True"]).train.compile is True


def test_tables_are_merged_and_lists_replaced(write, base):
    """T060"""
    path = write(
        "base: base.yaml\ndata:\n  sources:\n    code: {paths: [a.txt]}\noptimizer: {betas: [0.8, 0.9]}\n"
    )
    recipe = load(path, ["data.sources.books.weight=2", "optimizer.betas=[0.7, 0.99]"])
    assert recipe.data.sources["code"].paths == ["a.txt"]
    assert recipe.data.sources["books"].paths == ["bible:"]
    assert recipe.data.sources["books"].weight == 2.0
    assert recipe.optimizer.betas == [0.7, 0.99]
    assert recipe.optimizer.lr == 1e-3
    assert "betas: [0.7, 0.99]" in to_yaml(recipe)


def test_null_takes_an_inherited_source_or_letter_out(write, base):
    middle = write("base: base.yaml\nmodel:\n  layers: {X: {kind: kvm}, K: {chunk: 16}}\n", "middle.yaml")
    assert set(load(middle).model.layers) == {"K", "F", "X"}
    recipe = load(middle, ["data.sources.books=null", "model.layers.X=null"])
    assert list(recipe.data.sources) == ["code"]
    assert set(recipe.model.layers) == {"K", "F"}


def test_an_empty_section_changes_nothing(write, base):
    assert load(write("base: base.yaml\noptimizer:\n")) == load(base)


def test_all_open_unresolvable_and_circular_values_are_listed_together(write):
    """T060"""
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
    assert any("refers to a table that it is part of" in problem for problem in problems)
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
    """T061"""
    (problem,) = refused(base, override)
    assert problem.startswith(("override", override[:5]))
    assert "command line" in problem or "override" in problem
    assert words in problem


@pytest.mark.parametrize("override", ["train.steps", "", "=5", "train..steps=3", "--steps"])
def test_an_override_without_key_or_value_is_refused(base, override):
    """T061"""
    (problem,) = refused(base, override)
    assert problem == f"override {override!r}: write key=value, such as optimizer.lr=1e-3"


def test_values_that_look_like_code_are_plain_text(base, tmp_path):
    """T061: no file appears."""
    victim = tmp_path / "victim"
    for code in (
        f"__import__('pathlib').Path('{victim}').touch()",
        f"$(touch {victim})",
        f"!!python/object/apply:os.system ['touch {victim}']",
        f"lambda: open('{victim}', 'w')",
    ):
        assert load(base, [f"train.output={code}"]).train.output == code
    assert not victim.exists()


def test_yaml_tags_and_aliases_are_refused(write, tmp_path):
    victim = tmp_path / "victim"
    path = write(BASE + f"monitor: !!python/object/apply:os.system ['touch {victim}']\n")
    assert "YAML tags" in refused(path)[0]
    assert not victim.exists()
    path = write("a: &a [x]\nb: &b [*a, *a]\n")
    assert refused(path) == ["line 2: YAML aliases (*a) are not supported; write ${section.key}"]


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


def test_keys_written_twice_are_refused(write):
    path = write(BASE + "monitor:\n  log_every: 5\n  log_every: 6\n")
    assert refused(path) == ["monitor.log_every (mine.yaml:11): written twice"]


def test_files_that_are_no_recipes_are_refused_in_words(write, tmp_path):
    for text, name, words in [
        ("- a\n", "list.yaml", "a table of sections"),
        ("model: {pattern: K\n", "open.yaml", "not YAML: line"),
        ('{"model": }', "open.json", "not JSON: line 1"),
        ("[" * 1000, "deep.yaml", ""),
    ]:
        assert words in refused(write(text, name))[0]
    assert "no shipped recipe of that name" in refused(tmp_path / "absent.yaml")[0]


def test_bases_in_a_circle_are_refused(write):
    write("base: b.yaml\n", "a.yaml")
    path = write("base: a.yaml\n", "b.yaml")
    assert refused(path) == ["base: the files name one another in a circle: b.yaml -> a.yaml -> b.yaml"]


def test_a_base_is_looked_for_beside_the_file_then_among_the_shipped(write, tmp_path, base):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x.yaml").write_text("base: ../mine.yaml\noptimizer: {clip: 3}\n")
    write("base: base.yaml\noptimizer: {clip: 2, eps: 1e-6}\n")
    recipe = load(tmp_path / "deep" / "x.yaml")
    assert (recipe.optimizer.clip, recipe.optimizer.eps, recipe.optimizer.lr) == (3.0, 1e-6, 1e-3)
    (problem,) = refused(write("base: nowhere\n"))
    assert problem.startswith("base (mine.yaml): no file")
    assert "shipped: " in problem


def test_problems_name_the_file_that_has_the_last_word(write, base):
    path = write("base: base.yaml\ntrain:\n\n  steps: many\n")
    assert refused(path) == ["train.steps (mine.yaml:4): expected a whole number, found 'many'"]
    bad = write(BASE.replace("steps: 10", "steps: few"), "bad.yaml")
    assert refused(bad) == ["train.steps (bad.yaml:8): expected a whole number, found 'few'"]
    assert refused(write("base: bad.yaml\n"))[0].startswith("train.steps (bad.yaml:8)")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["train.precision=fp16"], "train.precision", "allowed: fp32, bf16. fp16 cannot be trained on CPUs"),
        (
            ["train.precision=bf16", "parallel.zero_stage=0"],
            "train.precision",
            "needs parallel.zero_stage 1 or higher",
        ),
        (["parallel.zero_stage=4"], "parallel.zero_stage", "allowed: 0, 1, 2, 3"),
        (
            ["parallel.sequence=3", "data.context=130"],
            "parallel.sequence",
            "3 ranks per sequence: layer 2 has 4 heads for 130 tokens",
        ),
        (
            ["parallel.sequence=4", "data.context=130"],
            "parallel.sequence",
            "130 tokens (data.context) / 4 ranks per sequence does not divide",
        ),
        (["parallel.sequence=2", "data.order=document"], "data.order", "pieces of unequal length"),
        (["model.norm=batchnorm"], "model.norm", "allowed: layernorm, rmsnorm"),
        (["data.sources.code.format=csv"], "data.sources.code.format", "allowed: auto, text, jsonl, parquet"),
        (["data.sources.code.weight=0"], "data.sources.code.weight", "more than 0"),
        (["data.sources.code.paths=[]"], "data.sources.code.paths", "at least one"),
        (["data.sources.code=null", "data.sources.books=null"], "data.sources", "at least one source"),
        (["optimizer.betas=[0.9]"], "optimizer.betas", "two numbers"),
        (["optimizer.lr=-1e-3"], "optimizer.lr", "is -0.001; allowed: 0 or more"),
        (["schedule.warmup_steps=11"], "schedule.warmup_steps", "take 11 steps, but train.steps is 10"),
        (["schedule.decay_steps=3"], "schedule.decay_steps", "schedule.shape is linear"),
        (["train.steps=0"], "train.steps", "allowed: 1 or more"),
        (["train.micro_batch_size=3"], "train.batch_size", "8 is no multiple of train.micro_batch_size 3"),
        (["model.depth=4"], "model.depth", "says 4 layers, but model.pattern 'K2F' has 3"),
        (["model.hidden_size=30"], "model.layers.F", "hidden_size 30 is no multiple of num_heads 4"),
        (["model.layers.K.chunk=0"], "model.layers.K", "(kvm) chunk is 0; allowed: 1 or more"),
        (
            ["model.layers.K.budget=cubic"],
            "model.layers.K.budget",
            "expected one of fixed, power_law, found 'cubic'",
        ),
        (["model.layers.K.kind=kmv"], "model.layers.K.kind", "'kmv' is not available; did you mean kvm?"),
        (["model.layers.X.chunk=3"], "model.layers.X", "needs a kind: full, kvm"),
    ],
)
def test_rules_are_kept_with_reasons(base, overrides, key, words):
    """T015 (fp16, bf16 without ZeRO), T042"""
    (problem,) = refused(base, *overrides)
    assert problem.split(" ")[0].rstrip(":") == key
    assert words in problem


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


def test_a_pattern_fault_shows_the_caret(base):
    """T041"""
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


@pytest.mark.parametrize(
    ("processes", "sequence", "batch", "micro", "expected"),
    [
        (1, 1, 8, None, Geometry(1, 1, 8, 1)),
        (2, 1, 8, None, Geometry(2, 2, 4, 1)),
        (2, 1, 8, 2, Geometry(2, 2, 2, 2)),
        (2, 2, 8, 2, Geometry(2, 1, 2, 4)),
        (4, 2, 12, 3, Geometry(4, 2, 3, 2)),
    ],
)
def test_batch_arithmetic_counts_data_parallel_processes(base, processes, sequence, batch, micro, expected):
    """T019"""
    recipe = load(base)
    recipe.parallel.sequence, recipe.train.batch_size, recipe.train.micro_batch_size = sequence, batch, micro
    assert batch_geometry(recipe, processes) == expected
    assert expected.data_parallel * expected.micro_batch * expected.accumulation == batch


@pytest.mark.parametrize(
    ("processes", "sequence", "batch", "micro", "numbers"),
    [
        (2, 1, 8, 3, ["8", "2 processes / 1", "= 2 data-parallel", "2 x 3 = 6", "1.333"]),
        (2, 2, 8, 3, ["8", "2 processes / 2", "= 1 data-parallel", "1 x 3 = 3"]),
        (3, 2, 8, 2, ["3 processes / 2"]),
        (3, 1, 8, None, ["8", "3 processes / 1", "3 data-parallel"]),
        (4, 1, 2, 1, ["2 sequences", "4 x 1 = 4"]),
    ],
)
def test_batch_sizes_that_do_not_divide_are_refused_with_all_numbers(
    base, processes, sequence, batch, micro, numbers
):
    """T019"""
    recipe = load(base)
    recipe.parallel.sequence, recipe.train.batch_size, recipe.train.micro_batch_size = sequence, batch, micro
    with pytest.raises(RecipeError) as caught:
        batch_geometry(recipe, processes)
    assert all(number in str(caught.value) for number in numbers)


def test_the_batch_is_checked_on_loading_where_the_processes_are_known(base):
    """T019: before anything is built"""
    assert load(base, ["train.micro_batch_size=2"], world_size=2).train.micro_batch_size == 2
    (problem,) = refused(base, "train.micro_batch_size=4", world_size=3)
    assert "3 x 4 = 12" in problem


def test_a_saved_recipe_holds_pattern_list_and_table_that_agree(base, tmp_path):
    """T042: read by plain YAML and JSON readers"""
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
    ("override", "words"),
    [
        ("model.layers.K.kind=[kvm]", "model.layers.K.kind (command line): expected the name of a kind"),
        ("train.micro_batch_size=0", "train.micro_batch_size (command line): is 0; allowed: 1 or more"),
        ("model.hidden_size=99999999999", "is 99999999999; allowed: 1 or more, up to 1048576"),
        ("train.steps=100000000", "allowed: 1 or more, up to 99999999"),
        ("model.depth=99999999999999999999", "expected a whole number below 2^63"),
        ("data.vocab_size=3000000000", "allowed: 260 or more, up to 16777216"),
        ("train.output=\udcff", "expected text in valid Unicode, found '\\udcff'"),
        ("model=3", "model (command line): expected a table of keys, found '3'"),
    ],
)
def test_impossible_values_are_refused_by_key(base, override, words):
    """The one problem of each: nothing is divided, built or looked up by it before."""
    (problem,) = refused(base, override)
    assert words in problem


@pytest.mark.parametrize("key", ["model.hidden_size", "model.layers.K.chunk", "optimizer.betas"])
def test_any_key_left_open_is_refused(base, key):
    """T060: also one that has a default, which must not be taken in silence."""
    (problem,) = refused(base, f"{key}=???")
    assert problem == f"{key} (command line): is left open (???): give it a value"
