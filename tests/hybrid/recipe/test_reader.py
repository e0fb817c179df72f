"""Recipe files, the files they name as base, and words of the command line: merging, and what is refused."""

import pytest

from hybrid.recipe import load, to_yaml

from ..two_kinds import BASE, refused

pytestmark = pytest.mark.usefixtures("two_kinds")


def test_tables_are_merged_and_lists_replaced(write, base):
    """omry/omegaconf#305"""
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


@pytest.mark.parametrize("override", ["train.steps", "", "=5", "train..steps=3", "--steps"])
def test_an_override_without_key_or_value_is_refused(base, override):
    (problem,) = refused(base, override)
    assert problem == f"override {override!r}: write key=value, such as optimizer.lr=1e-3"


def test_yaml_tags_and_aliases_are_refused(write, tmp_path):
    victim = tmp_path / "victim"
    path = write(BASE + f"monitor: !!python/object/apply:os.system ['touch {victim}']\n")
    assert "YAML tags" in refused(path)[0]
    assert not victim.exists()
    path = write("a: &a [x]\nb: &b [*a, *a]\n")
    assert refused(path) == ["line 2: YAML aliases (*a) are not supported; write ${section.key}"]


def test_keys_written_twice_are_refused(write, base):
    path = write(BASE + "monitor:\n  log_every: 5\n  log_every: 6\n")
    assert refused(path) == ["monitor.log_every (mine.yaml:11): written twice, in lines 10 and 11"]
    assert refused(write("base: base.yaml\nbase: base.yaml\n")) == [
        "base (mine.yaml:2): written twice, in lines 1 and 2"
    ]
    path = write('{"base": "base.yaml",\n"train": {"seed": 1,\n"seed": 2}}', "mine.json")
    assert refused(path) == ["train.seed (mine.json:3): written twice, in lines 2 and 3"]
    override = "model.layers.K={kind: kvm, chunk: 64, chunk: 128}"
    assert refused(base, override) == ["model.layers.K.chunk (command line): written twice"]


def marked(text):
    return text.encode("utf-8-sig")


@pytest.mark.parametrize("name", ["mine.yaml", "mine.json"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_byte_marks_and_line_ends_change_nothing(base, tmp_path, name, ends):
    text = '{"base": "base.yaml",\n"train":\n{"prompts": ["one"],\n"seed": 3}}\n'
    (tmp_path / name).write_bytes(marked(text.replace("\n", ends)))
    assert load(tmp_path / name) == load(base, ["train.prompts=[one]", "train.seed=3"])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
@pytest.mark.parametrize("name", ["mine.yaml", "mine.json"])
def test_other_encodings_are_refused_in_words(tmp_path, name, encoding):
    (tmp_path / name).write_bytes('{"model": "\xe9"}'.encode(encoding))
    (problem,) = refused(tmp_path / name)
    assert problem.startswith("is not UTF-8 text")


def test_json_may_be_written_in_any_way_json_allows(write, base):
    prompts = '["\\ud83d\\ude00 \\u2028\\/", "\u2028\x7f é"]'
    text = '{\n\t"base":"base.yaml",\n\t"train": {"prompts": %s, "seed":3}}' % prompts  # noqa: UP031
    recipe = load(write(text, "mine.json"))
    assert recipe.train.prompts == ["\U0001f600 \u2028/", "\u2028\x7f é"]
    assert recipe.train.seed == 3
    assert refused(write(text.replace("3}", "x}"), "mine.json"))[0].startswith("not JSON: line 3")


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
