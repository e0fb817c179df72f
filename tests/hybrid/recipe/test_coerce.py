"""What is written in a recipe becomes a number, a text or a truth value by the key's type."""

import pytest
import yaml

from hybrid.recipe import load, to_yaml

from ..two_kinds import refused

pytestmark = pytest.mark.usefixtures("two_kinds")


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
    """huggingface/trl#1450: also the printed configuration shows a number."""
    in_file = load(write(f"base: base.yaml\noptimizer:\n  lr: {written}\n"))
    overridden = load(base, [f"optimizer.lr={written}"])
    for recipe in (in_file, overridden):
        assert type(recipe.optimizer.lr) is float
        assert recipe.optimizer.lr == value
        assert type(yaml.safe_load(to_yaml(recipe))["optimizer"]["lr"]) is float


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "1.0e-4", "0.1e-3", '"1e-4"', '".1e-3"'])
def test_numbers_are_floats_in_json(write, base, written):
    path = write('{"base": "base.yaml", "optimizer": {"lr": %s}}' % written, "mine.json")  # noqa: UP031
    assert load(path).optimizer.lr == 1e-4


@pytest.mark.parametrize(
    "written", ["abc", "1e", "0x10", "1,5", "nan", "inf", "1e999", "true", "[1]", "{a: 1}", "٣"]
)
def test_other_texts_for_a_number_are_refused_with_the_key(base, written):
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


def test_values_that_look_like_code_are_plain_text(base, tmp_path):
    """omry/omegaconf#157: nothing is evaluated, no file appears."""
    victim = tmp_path / "victim"
    for code in (
        f"__import__('pathlib').Path('{victim}').touch()",
        f"$(touch {victim})",
        f"!!python/object/apply:os.system ['touch {victim}']",
        f"lambda: open('{victim}', 'w')",
    ):
        assert load(base, [f"train.output={code}"]).train.output == code
    assert not victim.exists()
