"""`hybrid verify`: the stored vectors hold on this machine, and everything wrong with a folder is told."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.verify import CaseResult, Setting, VerifyError, check_folder, table, verify
from hybrid.verify.mixers import LAYERS, run_layer
from hybrid.verify.vectors import Case, read_cases

ROOT = Path(__file__).parents[3]
VECTORS = ROOT / "tests" / "vectors"
EVERYTHING = ROOT.parent / "shared" / "conformance"


CORE = ("y", "state", "route", "grad")
MODEL = ("logits", "decode", "loss", "grad")
LAYER = ("y", "state", "grad")
LAYER_WITH_CHOICES = ("y", "state", "grad", "route")


def statuses(results):
    return {result.name: result.status for result in results}


def test_the_stored_vectors_hold(capsys):
    assert verify(VECTORS) == 0
    printed = capsys.readouterr().out
    assert "17 passed, 0 failed, 0 not covered" in printed
    assert printed.count("pass ") >= 17


def test_the_stored_vectors_are_compact():
    assert sum(path.stat().st_size for path in VECTORS.iterdir()) <= 3_000_000


def test_all_vectors_hold_where_they_are():
    if not EVERYTHING.is_dir():
        pytest.skip(f"the full set of vectors is not beside this checkout ({EVERYTHING.name} is absent)")
    results = check_folder(EVERYTHING)
    assert [f"{result.name}: {result.reason}" for result in results if result.status != "pass"] == []
    assert len(results) == 65
    for result in results:
        assert set(result.errors) in map(set, (CORE, MODEL, LAYER, LAYER_WITH_CHOICES, ["init"])), result.name


def test_the_selection_has_every_kind_of_layer():
    """So that a clone alone verifies all of them."""
    cases = read_cases(VECTORS)
    mixers = {case.config["token_mixer"] for case in cases if "token_mixer" in case.config}
    assert mixers == {"kvm", "gptalpha_bswa", "rwkv7"}
    assert {case.kind for case in cases} - {None, "model"} == {*LAYERS, "rwkv7_init", "gdn_op"}


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
    assert only(check_folder(folder), "core_fixed_T5").reason == "y is off by inf (allowed 0)"


def test_missing_and_damaged_files_fail_in_words(folder):
    (folder / "core_fixed_T5.safetensors").unlink()
    path = folder / "model_blockwindow_sink1.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    results = check_folder(folder)
    assert only(results, "core_fixed_T5").reason == "core_fixed_T5.safetensors is missing"
    assert "is damaged" in only(results, "model_blockwindow_sink1").reason
    assert set(statuses(results).values()) == {"fail"}


def test_a_device_that_is_not_there_is_refused_before_any_case():
    with pytest.raises(VerifyError, match="device 'abacus' cannot be used here"):
        Setting("abacus")


def test_an_index_nested_too_deep_is_refused_in_words(folder):
    (folder / "index.json").write_text("[" * 100_000)
    with pytest.raises(VerifyError, match="has no readable list of cases"):
        check_folder(folder)


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
        cases[0]["config"]["token_mixer"] = "retnet"
        cases.append({"file": "x.safetensors", "level": "kernel"})

    rewrite(folder, edit)
    mixers = {"cases": {"mixer_retnet": {"file": "mixer_retnet.safetensors", "kind": "retnet"}}}
    (folder / "mixers_index.json").write_text(json.dumps(mixers))
    assert verify(folder) == 1
    printed = capsys.readouterr().out
    assert "0 passed, 0 failed, 3 not covered" in printed
    assert "nothing was verified" in printed
    assert "token_mixer is 'retnet'" in printed
    assert "no check for cases of kind 'retnet'" in printed
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


# Layers


@pytest.fixture
def mixers(tmp_path):
    """The stored cases of layers, under names that mean nothing."""
    index = json.loads((VECTORS / "mixers_index.json").read_text())
    renamed = {}
    for number, (name, case) in enumerate(index["cases"].items()):
        shutil.copy(VECTORS / case["file"], tmp_path / f"{number}.safetensors")
        renamed[name.removeprefix("mixer_")] = case | {"file": f"{number}.safetensors"}
    (tmp_path / "mixers_index.json").write_text(json.dumps(index | {"cases": renamed}))
    return tmp_path


def mixers_changed(folder, name, edit_entry=None, edit_tensors=None):
    """The result of one case after a change of its entry or its tensors."""
    path = folder / "mixers_index.json"
    index = json.loads(path.read_text())
    case = index["cases"][name]
    if edit_entry is not None:
        edit_entry(case)
    if edit_tensors is not None:
        tensors = load_file(folder / case["file"])
        edit_tensors(tensors)
        save_file(tensors, folder / case["file"])
        case["tensors"] = {
            n: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for n, t in tensors.items()
        }
    path.write_text(json.dumps(index | {"cases": {name: case}}))
    (result,) = check_folder(folder)
    return result


def test_layers_are_known_by_kind_and_not_by_name(mixers):
    assert set(statuses(check_folder(mixers)).values()) == {"pass"}


@pytest.mark.parametrize(
    ("case", "tensor", "group"),
    [
        ("rwkv7_carry", "y", "y"),
        ("rwkv7_carry", "state.shift", "state"),
        ("rwkv7_carry", "grad.init.state", "grad"),
        ("rwkv7_init", "layer2.w0", "init"),
        ("ovq_t75", "state.counts", "state"),
        ("ovq_t75", "state.pending_k", "state"),
        ("ovq_t75", "grad.v_first", "grad"),
        ("gdn_gva", "grad.param.A_log", "grad"),
        ("gdn_op", "state.recurrent", "state"),
        ("gdn_op", "grad.beta", "grad"),
        ("kda_carry", "grad.init.conv_k", "grad"),
        ("mamba2_carry", "state.conv", "state"),
        ("model_rwkv7_swa", "logits", "logits"),
        ("model_rwkv7_swa", "grad.param.transformer.h.1.attn.v0", "grad"),
    ],
)
def test_every_tensor_of_a_mixer_counts(mixers, case, tensor, group):
    def by_a_thousandth_of_its_largest_entry(tensors):
        tensors[tensor].view(-1)[-1].add_(1e-3 * tensors[tensor].abs().max())

    result = mixers_changed(mixers, case, edit_tensors=by_a_thousandth_of_its_largest_entry)
    assert result.status == "fail"
    assert result.reason.startswith(f"{tensor} is off by")
    assert group in result.errors


def test_a_gradient_that_should_vanish_is_measured_by_the_largest_of_all(mixers):
    zero = "grad.param.transformer.h.0.attn.v_gate0"

    def add(size):
        def edit(tensors):
            steepest = max(float(t.abs().max()) for n, t in tensors.items() if n.startswith("grad."))
            tensors[zero].view(-1)[0].add_(size * steepest)

        return edit

    assert mixers_changed(mixers, "model_rwkv7_swa", edit_tensors=add(3e-7)).status == "pass"
    result = mixers_changed(mixers, "model_rwkv7_swa", edit_tensors=add(3e-6))
    assert result.reason.startswith(f"{zero} is off by")


def test_another_choice_of_centroid_is_a_failure(mixers):

    def swap(tensors):
        slots = tensors["mid.assignments"][0, 0]
        other = int((slots != slots[0]).nonzero()[0])
        slots[[0, other]] = slots[[other, 0]]

    result = mixers_changed(mixers, "ovq_t75", edit_tensors=swap)
    assert result.reason == "mid.assignments is off by 2 (allowed 0)"


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("ovq_t75", {"use_delta_rule": True}, "use_delta_rule is True: ovq has False only"),
        ("ovq_t75", {"window_size": 32}, "window_size is 32 and chunk_size 16"),
        ("mamba2_carry", {"norm_before_gate": True}, "norm_before_gate is True: mamba2 has False only"),
        ("gdn_gva", {"l2norm_eps": 1e-3}, "l2norm_eps is 0.001"),
        ("gdn_op", {"scale": "1"}, "scale is '1'; supported: 'K**-0.5'"),
        ("model_rwkv7_swa", {"token_mixer": "retnet"}, "token_mixer is 'retnet'"),
    ],
)
def test_what_our_layers_do_not_have_is_not_covered(mixers, case, change, words):
    result = mixers_changed(mixers, case, lambda entry: entry["config"].update(change))
    assert result.status == "not covered"
    assert result.reason.startswith(words)


def test_start_states_of_other_tensors_are_not_covered(mixers):
    result = mixers_changed(
        mixers, "kda_carry", edit_tensors=lambda t: t.update({"init.more": torch.zeros(2, 3)})
    )
    assert result.status == "not covered"
    assert "a kimi_delta state has recurrent, conv_q" in result.reason


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("param.A_log"), "parameters that only one of the case and our layer has: A_log"),
        (lambda t: t.update({"param.A_log": torch.zeros(2)}), "parameter A_log is (2,), ours is (4,)"),
        (
            lambda t: t.update({"grad.param.B": torch.zeros(2)}),
            "grad.param.B is stored, but is none of our results",
        ),
        (lambda t: t.pop("state.conv_q"), "the case has no state.conv_q, our state has"),
    ],
)
def test_cases_that_do_not_fit_fail_in_words(mixers, edit, words):
    result = mixers_changed(mixers, "gdn_gva", edit_tensors=edit)
    assert (result.status, result.reason) == ("fail", words)


def test_an_unread_x_v_is_left_out(mixers):
    """Upstream's attention with value residual and without token shift has one."""

    def without_shift(tensors):
        for name in [n for n in tensors if n.endswith(("x_q", "x_k")) or n.startswith(("state.", "mid."))]:
            del tensors[name]
        entry = {"kind": "ovq", "config": config | {"token_shift": False}}
        tensors.update(
            {n: t.detach().contiguous() for n, t in run_layer(Case("", mixers, entry), tensors).items()}
        )
        tensors["param.x_v"].zero_()
        tensors["grad.param.x_v"].zero_()

    config = next(case.config for case in read_cases(mixers) if case.kind == "ovq")
    edit = lambda entry: entry["config"].update(token_shift=False)  # noqa: E731
    assert mixers_changed(mixers, "ovq_t75", edit, without_shift).reason == ""


def test_the_table_lines_up():
    results = [
        CaseResult("one", errors={"y": 1.5e-6, "route": 0.0}),
        CaseResult("another", "fail", {"y": 2.0}, "y is off by 2"),
        CaseResult("third", "not covered", reason="no check"),
    ]
    assert table(results).splitlines() == [
        "case     result             y  route",
        "one      pass         1.5e-06      0",
        "another  fail         2.0e+00      -  y is off by 2",
        "third    not covered        -      -  no check",
        "",
        "1 passed, 1 failed, 1 not covered",
    ]


def test_bf16_has_tolerances_of_its_own_and_replays_routes():
    results = {r.name: r for r in check_folder(VECTORS, Setting(precision="bf16"))}
    assert statuses(results.values()) == dict.fromkeys(results, "pass")
    operator = results["core_power_T75_bswa3"].errors
    assert 1e-3 < operator["y"] < 1e-1  # bf16 was really used
    assert "route" not in operator
