"""`hybrid verify`: the stored vectors hold on this machine, and everything wrong with a folder is told."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.verify import CaseResult, Setting, VerifyError, check_folder, table, verify

ROOT = Path(__file__).parent.parent.parent
VECTORS = ROOT / "tests" / "vectors"
EVERYTHING = ROOT.parent / "shared" / "conformance"


CORE = ("y", "state", "route", "grad")
MODEL = ("logits", "decode", "loss", "grad")


def statuses(results):
    return {result.name: result.status for result in results}


def test_the_stored_vectors_hold(capsys):
    assert verify(VECTORS) == 0
    printed = capsys.readouterr().out
    assert "14 passed, 0 failed, 0 not covered" in printed
    assert printed.count("pass ") >= 14


def test_the_stored_vectors_are_compact():
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) <= 3_000_000


def test_all_vectors_hold_where_they_are():
    if not EVERYTHING.is_dir():
        pytest.skip(f"the full set of vectors is not beside this checkout ({EVERYTHING.name} is absent)")
    results = check_folder(EVERYTHING)
    failed = [f"{result.name}: {result.reason}" for result in results if result.status == "fail"]
    assert not failed
    passed = [result for result in results if result.status == "pass"]
    assert len(passed) == 31
    for result in passed:
        groups = MODEL if "logits" in result.errors else CORE
        assert set(result.errors) == set(groups), result.name
    others = [result for result in results if result.status == "not covered"]
    assert others
    assert all(result.reason for result in others)


# Folders that are not right


@pytest.fixture
def folder(tmp_path):
    """Two cases: the shortest of the operator, and a model."""
    index = json.loads((VECTORS / "index.json").read_text())
    wanted = ("core_fixed_T5.safetensors", "model_blockwindow_sink1.safetensors")
    index["cases"] = [case for case in index["cases"] if case["file"] in wanted]
    for name in wanted:
        shutil.copyfile(VECTORS / name, tmp_path / name)
    (tmp_path / "index.json").write_text(json.dumps(index))
    return tmp_path


def change(folder, name, edit):
    """Edit the tensors of one case in place."""
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name)


def rewrite(folder, edit):
    """Edit the list of cases."""
    index = json.loads((folder / "index.json").read_text())
    edit(index["cases"])
    (folder / "index.json").write_text(json.dumps(index))


def only(results, name):
    return next(result for result in results if result.name == name)


def test_a_wrong_number_fails_its_case_alone(folder, capsys):
    change(folder, "core_fixed_T5.safetensors", lambda t: t["y"].add_(1e-3))
    assert verify(folder) == 1
    printed = capsys.readouterr().out
    assert "y is off by 0.001 (allowed 1e-05)" in printed
    assert "1 passed, 1 failed, 0 not covered" in printed


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("state.s_k", "state"),
        ("state.s_v", "state"),
        ("state.s_vlen", "state"),
        ("grad.q", "grad"),
        ("grad.front_head_temp", "grad"),
        ("route.slot", "route"),
        ("route.kind", "route"),
        ("route.update", "route"),
    ],
)
def test_every_tensor_of_the_operator_counts(folder, name, group):
    change(folder, "core_fixed_T5.safetensors", lambda t: t[name].view(-1)[0].add_(1))
    result = only(check_folder(folder), "core_fixed_T5")
    assert result.status == "fail"
    assert result.reason.startswith(f"{name} is off by 1")
    assert result.errors[group] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "group"), [("logits", "logits"), ("decode_logits", "decode"), ("loss", "loss")]
)
def test_every_tensor_of_a_model_counts(folder, name, group):
    change(folder, "model_blockwindow_sink1.safetensors", lambda t: t[name].view(-1)[-1].sub_(0.5))
    result = only(check_folder(folder), "model_blockwindow_sink1")
    assert (result.status, round(result.errors[group], 4)) == ("fail", 0.5)
    assert result.reason.startswith(f"{name} is off by")


def test_not_a_number_is_a_failure(folder):
    change(folder, "core_fixed_T5.safetensors", lambda t: t["y"].view(-1)[0].fill_(torch.nan))
    assert only(check_folder(folder), "core_fixed_T5").reason == "y is off by inf (allowed 1e-05)"


def test_missing_and_damaged_files_fail_in_words(folder):
    (folder / "core_fixed_T5.safetensors").unlink()
    path = folder / "model_blockwindow_sink1.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    results = check_folder(folder)
    assert only(results, "core_fixed_T5").reason == "core_fixed_T5.safetensors is missing"
    assert "is damaged" in only(results, "model_blockwindow_sink1").reason
    assert set(statuses(results).values()) == {"fail"}


def test_tensors_that_are_not_as_indexed_fail_in_words(folder):
    change(folder, "core_fixed_T5.safetensors", lambda t: t.pop("state.s_k"))
    assert "has no tensor 'state.s_k'" in only(check_folder(folder), "core_fixed_T5").reason
    change(folder, "core_fixed_T5.safetensors", lambda t: t.update({"state.s_k": torch.zeros(3)}))
    assert "'state.s_k' is float32 [3], the index says" in only(check_folder(folder), "core_fixed_T5").reason


def test_an_index_entry_that_lacks_something_fails_in_words(folder):
    rewrite(folder, lambda cases: cases[0].pop("config"))
    assert only(check_folder(folder), "core_fixed_T5").reason == "the case has no 'config'"


def test_unknown_mixers_and_levels_are_not_covered_and_not_passed(folder, capsys):
    def edit(cases):
        del cases[0]
        cases[0]["config"]["token_mixer"] = "ovq"
        cases.append({"file": "x.safetensors", "level": "kernel"})

    rewrite(folder, edit)
    mixers = {"cases": {"mixer_rwkv7_basic": {"file": "mixer_rwkv7_basic.safetensors", "kind": "rwkv7"}}}
    (folder / "mixers_index.json").write_text(json.dumps(mixers))
    assert verify(folder) == 1
    printed = capsys.readouterr().out
    assert "0 passed, 0 failed, 3 not covered" in printed
    assert "nothing was verified" in printed
    assert "token_mixer is 'ovq'" in printed
    assert "no check for mixers of kind 'rwkv7'" in printed
    assert "level 'kernel'" in printed


def test_switches_that_we_do_not_have_are_not_covered(folder):
    rewrite(folder, lambda cases: cases[1]["config"].update(use_l2wrap=True))
    result = only(check_folder(folder), "model_blockwindow_sink1")
    assert (result.status, result.reason.split(":")[0]) == ("not covered", "use_l2wrap is True")


def test_unreadable_indexes_are_told(tmp_path):
    with pytest.raises(VerifyError, match="no such folder"):
        check_folder(tmp_path / "none")
    with pytest.raises(VerifyError, match=r"neither index\.json nor mixers_index\.json"):
        check_folder(tmp_path)
    (tmp_path / "index.json").write_text('{"cases": [\n{"file": }]}')
    with pytest.raises(VerifyError, match=r"index.json: not valid JSON \(line 2"):
        check_folder(tmp_path)
    for text in ("[]", "{}", '{"cases": 3}', '{"cases": [3]}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(VerifyError, match="no readable list of cases"):
            check_folder(tmp_path)
    (tmp_path / "index.json").write_text('{"cases": []}')
    assert verify(tmp_path) == 1


def test_file_names_mean_nothing(folder):
    (folder / "core_fixed_T5.safetensors").rename(folder / "one.safetensors")
    rewrite(folder, lambda cases: cases[0].update(file="one.safetensors"))
    assert statuses(check_folder(folder)) == {"one": "pass", "model_blockwindow_sink1": "pass"}


def test_the_table_lines_up():
    results = [
        CaseResult("one", errors={"y": 1.5e-6, "route": 0.0}),
        CaseResult("another", "fail", {"y": 2.0}, "y is off by 2"),
        CaseResult("third", "not covered", reason="no check"),
    ]
    assert table(results).splitlines() == [
        "case     result               y    route",
        "one      pass           1.5e-06        0",
        "another  fail           2.0e+00        -  y is off by 2",
        "third    not covered          -        -  no check",
        "",
        "1 passed, 1 failed, 1 not covered",
    ]


def test_bf16_has_tolerances_of_its_own_and_replays_routes():
    results = {r.name: r for r in check_folder(VECTORS, Setting(precision="bf16"))}
    assert statuses(results.values()) == dict.fromkeys(results, "pass")
    operator = results["core_power_T75_bswa3"].errors
    assert 1e-3 < operator["y"] < 2e-2  # bf16 was really used
    assert "route" not in operator
