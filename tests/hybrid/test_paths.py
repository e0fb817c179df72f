"""One meaning of a path, in every key and option (`~`, what no file can be called)."""

import os
from pathlib import Path

import pytest

from hybrid.cli.main import main
from hybrid.paths import local_path
from hybrid.recipe import RecipeError, check, load

KEYS = ["data.folder", "data.tokenizer", "train.output", "train.init_from", "train.checkpoint_copy"]
IMPOSSIBLE = {
    "a\0b": "no path holds a NUL character",
    "x/" + "n" * 300: "a name of 300 bytes is too long for a path (at most 255)",
    "\N{SNOWMAN}" * 86: "a name of 258 bytes is too long",
    "d/" * 2100: "a path of 4200 bytes is too long",
    "~nosuchuser/x": "there is no user 'nosuchuser'; write ./~nosuchuser/x for",
}
OPTIONS = [
    ["generate"],
    ["generate", "run", "--prompts-file"],
    ["generate", "run", "--save-state"],
    ["generate", "run", "--load-state"],
    ["info", "debug", "--plot"],
    ["bench", "debug", "--output"],
    ["launch", "debug", "--hostfile"],
    ["verify"],
]


pytestmark = pytest.mark.usefixtures("two_kinds")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("~", "{home}"),
        ("~/x/~y", "{home}/x/~y"),
        ("./~", "./~"),
        ("a b/..", "a b/.."),
        ("~root/x", "/root/x"),
    ],
)
def test_a_leading_tilde_is_a_home_and_nothing_else_is(home, written, found):
    assert local_path(written) == found.format(home=home)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_is_a_path_expands_it_and_refuses_what_no_file_can_be_called(base, home, key):
    section, name = key.split(".")
    assert getattr(getattr(load(base, [f"{key}=~/x"]), section), name) == f"{home}/x"
    for path, words in IMPOSSIBLE.items():
        with pytest.raises(RecipeError) as error:
            load(base, [f"{key}={path}"])
        assert any(p.startswith(f"{key} (command line): ") and words in p for p in error.value.problems)


@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_sources_and_recipes_themselves_are_paths_too(base, write, path):
    quoted = path.replace("\0", "\\0")
    with pytest.raises(RecipeError, match=r"data\.sources\.text\.paths"):
        load(base, [f'data.sources.text.paths=["{quoted}"]'])
    with pytest.raises(RecipeError):
        load(path)
    with pytest.raises(RecipeError, match=r"base \(mine\.yaml\): "):
        load(write(f'base: "{quoted}"\n'))


def test_sources_stay_as_written_since_prepared_data_is_known_by_them(base):
    assert load(base, ["data.sources.text.paths=[~/texts]"]).data.sources["text"].paths == ["~/texts"]


def test_a_recipe_below_the_home_folder_is_found(base, home):
    home.mkdir()
    (home / "r.yaml").write_text(base.read_text())
    assert load("~/r.yaml") == load(base)


def test_a_recipe_made_in_code_says_what_loading_would_have_made_of_it(base, home):
    recipe = load(base)
    recipe.train.output = "~/x"
    with pytest.raises(RecipeError, match=rf"train\.output: is '~/x', .* write {home}/x"):
        check(recipe)


@pytest.mark.parametrize("option", OPTIONS, ids=" ".join)
def test_every_option_that_is_a_path_refuses_what_no_file_can_be_called(option, capsys):
    for path, words in IMPOSSIBLE.items():
        assert main([*option, path]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("hybrid: error: ")
        assert words in shown


def test_a_checkpoint_copy_in_a_circle_of_links_is_no_crash(base):
    os.symlink("loop", Path("loop"))
    load(base, ["train.checkpoint_copy=loop/x"])


def test_a_source_named_beyond_any_folder_is_refused(base):
    with pytest.raises(RecipeError, match="at most 255 bytes"):
        load(base, [f"data.sources.{'n' * 256}.paths=[in]"])
