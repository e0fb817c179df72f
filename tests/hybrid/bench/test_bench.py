"""`hybrid bench`: every number of its tables comes out, at tiny sizes; what it counts and how it times."""

import json

import pytest
import torch

from hybrid.bench.kvm import SECTIONS
from hybrid.bench.kvm_steps import kvm_steps
from hybrid.bench.mixers import TWINS
from hybrid.bench.operands import QUICK, Sizes, operator_flops
from hybrid.bench.report import Row, keep, rows_table
from hybrid.bench.runs import kvm_decoding, kvm_training
from hybrid.bench.timing import Steps, alternate
from hybrid.cli import main
from hybrid.layers import kinds


def test_kvm_prints_and_keeps_every_row_of_its_table(tmp_path, capsys):
    threads = torch.get_num_threads()
    assert main(["bench", "kvm", "--quick", "--threads", "1", "--output", str(tmp_path)]) == 0
    torch.set_num_threads(threads)
    found = json.loads((tmp_path / "kvm.json").read_text())
    assert list(found) == list(SECTIONS)
    counts = {name: len(section["rows"]) for name, section in found.items()}
    expected = {"training": 4, "twin": 2, "memory": 1, "prefill": 2, "decode": 5, "model": 1, "windows": 2}
    assert counts == expected
    assert set(found["training"]["seconds"]) == {"64", "128", "256"}
    assert (tmp_path / "kvm.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    table = printed[printed.rindex("work ") :]
    for section in found.values():
        for row in section["rows"]:
            assert row["work"] in table
            assert row["measured"] > 0
    assert "Steps of forward+backward, fixed 16, 128 tokens" in printed
    assert "attend, own chunk, backward" in printed
    assert "the targets do not apply" in printed


def test_a_part_alone_leaves_the_others_results(tmp_path):
    keep(tmp_path / "kvm.json", {"memory": {"bytes": 5}})
    arguments = ["--quick", "--threads", "1", "--only", "windows", "--output", str(tmp_path)]
    assert main(["bench", "kvm", *arguments]) == 0
    found = json.loads((tmp_path / "kvm.json").read_text())
    assert found["memory"] == {"bytes": 5}
    assert set(found) == {"memory", "windows"}


def test_mixers_measure_every_kind(tmp_path, capsys):
    assert main(["bench", "mixers", "--quick", "--threads", "1", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "mixers.json").read_text())
    assert set(found) == set(kinds())
    for kind, one in found.items():
        assert one["decode_seconds"] > 0
        assert ("rows" in one) == (kind in TWINS)
    assert found["full"]["state_bytes"]["64"] > found["full"]["state_bytes"]["32"]
    assert found["rwkv7"]["state_bytes"]["64"] == found["rwkv7"]["state_bytes"]["32"]
    assert (tmp_path / "mixers.png").exists()
    assert "counted" in capsys.readouterr().out


def test_a_model_is_timed_by_part(tmp_path, capsys):
    overrides = ["data.context=32", "train.batch_size=1"]
    arguments = ["debug", *overrides, "--threads", "1", "--output", str(tmp_path)]
    assert main(["bench", "model", *arguments]) == 0
    found = json.loads((tmp_path / "model.json").read_text())["KWBF"]
    parts = {entry["part"]: entry for entry in found["training"]["parts"]}
    own = {"mixer kvm", "mixer full", "mixer sliding_window", "mixer block_window", "feed-forward", "head"}
    assert own <= set(parts)
    assert sum(e["share"] for name, e in parts.items() if name != "step") == pytest.approx(1)
    assert found["decode"]["parts"]["mixer kvm"] > 0
    assert set(found["prefill"]["parts"]) == set(found["decode"]["parts"])
    assert "Training step of 1 x 32 tokens, fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "bench model needs a RECIPE"),
        (["kvm", "debug"], "bench kvm takes no 'debug'"),
        (["model", "debug", "--quick"], "takes neither --quick nor --only"),
        (["kvm", "--only", "speed"], "bench kvm has no part 'speed'; its parts: training"),
        (["scale", "--only", "speed"], "bench scale has no part 'speed'; its parts: processes"),
        (["mixers", "--only", "lstm"], "there is no kind of layer 'lstm'"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_ideals_are_ratios_of_counted_flops():
    sizes = Sizes()
    full = operator_flops(sizes.full(), 8192)
    assert full.training == 3 * 4 * 768 * 8193 / 2
    # 128.5 keys of the own chunk on average; chunk 0 sees no other chunk and chunks 0 and 1 see no slots
    visible = (256 * 31 + 256 * 30) / 32 + 128.5
    fixed = operator_flops(sizes.kvm("fixed"), 8192)
    assert fixed.differentiable == pytest.approx(4 * 768 * visible)
    # 29 updates compare a chunk's keys with 256 slots each: the first state needs none
    assert fixed.routing == pytest.approx(29 * 2 * 256 * 256 * 768 / 8192)
    assert full.training / fixed.training == pytest.approx(37_753_344 / 6_038_016)


def test_steps_are_timed_without_the_steps_inside_them(monkeypatch):
    clock = iter([0.0, 2.0, 7.0, 8.0])  # outer begins, inner begins, inner ends, outer ends
    monkeypatch.setattr("hybrid.bench.timing.time.perf_counter", lambda: next(clock))
    steps = Steps()
    with steps.step("outer"), steps.step("inner"):
        assert steps.inside == ("outer", "inner")
    assert steps.seconds == {"outer": 3.0, "inner": 5.0}


def test_the_operators_four_steps_are_found():
    found = kvm_steps(kvm_training(QUICK, "sqrt", 128))
    expected = {"route", "accumulate and read", "join of window", "join of state"}
    expected |= {"accumulate and read, backward", "gather gradients of window", "gather gradients of state"}
    expected |= {
        f"attend, {where}, {phase}"
        for where in ("own chunk", "previous chunk", "state")
        for phase in ("forward", "backward")
    }
    assert expected <= set(found)


def test_runs_take_turns_after_an_untimed_round():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = alternate(runs, rounds=3)
    assert "".join(calls) == "ab" * 4
    assert set(times) == {"a", "b"}


def test_a_decoding_run_goes_on_where_the_last_one_ended():
    run, now = kvm_decoding(QUICK, "fixed", 64)
    assert now().position == 64
    run()
    run()
    assert now().position == 64 + 2 * QUICK.chunk


def test_rows_say_what_was_missed():
    met, missed = Row("a", "b", 2.0, 1.5), Row("c", "d", 2.0, 1.5, at_least=False, unit=" GiB")
    assert (met.met, missed.met) == (True, False)
    lines = rows_table([met, missed]).splitlines()
    assert lines[1].split() == ["a", "b", "2x", "-", "at", "least", "1.5x", "met"]
    assert lines[2].split() == ["c", "d", "2", "GiB", "-", "at", "most", "1.5", "GiB", "MISSED"]
