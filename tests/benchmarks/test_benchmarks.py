"""The scripts of `benchmarks/` at tiny sizes: every number comes out; what they count and time."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import kvm, mixers
from benchmarks.command import Row, keep_section, rows_table
from benchmarks.measure import Steps, alternate, peak_bytes
from benchmarks.workloads import QUICK, STEPS, Sizes, copying, kvm_decoding, kvm_steps, training
from hybrid.layers import kinds

ROOT = Path(__file__).parents[2]


def test_kvm_prints_and_keeps_every_row_of_its_table(tmp_path, capsys):
    kvm.main(["--quick", "--threads", "1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "kvm-quick.json").read_text())
    assert list(found) == list(kvm.SECTIONS)
    counts = {name: len(section["rows"]) for name, section in found.items()}
    expected = {"training": 4, "twin": 2, "memory": 1, "prefill": 2, "decode": 5, "model": 1, "windows": 2}
    assert counts == expected
    assert set(found["training"]["seconds"]) == {"64", "128", "256"}
    assert (tmp_path / "kvm-quick.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    table = printed[printed.rindex("work ") :]
    for section in found.values():
        for row in section["rows"]:
            assert row["work"] in table
            assert row["measured"] > 0
    assert "Steps of forward+backward, fixed 16, 128 tokens" in printed
    assert "attend, backward" in printed
    assert "the targets do not apply" in printed


def test_a_section_alone_leaves_the_others_results(tmp_path):
    keep_section(tmp_path / "kvm-quick.json", "memory", {"bytes": 5})
    kvm.main(["--quick", "--threads", "1", "--only", "windows", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "kvm-quick.json").read_text())
    assert found["memory"] == {"bytes": 5}
    assert set(found) == {"memory", "windows"}


def test_mixers_measure_every_kind(tmp_path, capsys):
    mixers.main(["--quick", "--threads", "1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "mixers-quick.json").read_text())
    assert set(found) == set(kinds())
    for kind, one in found.items():
        assert one["decode_seconds"] > 0
        assert ("rows" in one) == (kind in mixers.TWINS)
    assert found["full"]["state_bytes"]["64"] > found["full"]["state_bytes"]["32"]
    assert found["rwkv7"]["state_bytes"]["64"] == found["rwkv7"]["state_bytes"]["32"]
    assert (tmp_path / "mixers-quick.png").exists()
    assert "counted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "wrong"), [(kvm.main, "speed"), (mixers.main, "lstm")], ids=["section", "kind"]
)
def test_an_unknown_section_is_told_with_those_there_are(main, wrong, capsys):
    with pytest.raises(SystemExit):
        main(["--only", wrong])
    assert re.search(f"invalid choice: '{wrong}' .*(training|rwkv7)", capsys.readouterr().err)


def test_the_kept_results_have_the_sections_of_today():
    """Results are kept in the repository: those of a renamed section would stay there for ever."""
    for name, known in (("kvm", kvm.SECTIONS), ("mixers", kinds())):
        assert set(json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())) <= set(known)


def test_ideals_are_ratios_of_counted_flops():
    sizes = Sizes()
    full = sizes.flops("full", 8192)
    assert full.training == 3 * 4 * 768 * 8193 / 2
    # 128.5 keys of the own chunk on average; chunk 0 sees no other chunk and chunks 0 and 1 see no slots
    visible = (256 * 31 + 256 * 30) / 32 + 128.5
    fixed = sizes.flops("fixed", 8192)
    assert fixed.differentiable == pytest.approx(4 * 768 * visible)
    # 29 updates compare a chunk's keys with 256 slots each: the first state needs none
    assert fixed.routing == pytest.approx(29 * 2 * 256 * 256 * 768 / 8192)
    assert sizes.ideal("fixed", 8192) == pytest.approx(37_753_344 / 6_038_016)


def test_steps_are_timed_without_the_steps_inside_them(monkeypatch):
    clock = iter([0.0, 2.0, 7.0, 8.0])  # outer begins, inner begins, inner ends, outer ends
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: next(clock))
    steps = Steps()
    with steps.step("outer"), steps.step("inner"):
        pass
    assert steps.seconds == {"outer": 3.0, "inner": 5.0}


def test_the_operators_steps_are_found():
    found = kvm_steps(training(QUICK, "sqrt", 128))
    assert set(STEPS.values()) <= set(found)


def test_runs_take_turns_after_an_untimed_round():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = alternate(runs, rounds=3)
    assert "".join(calls) == "ab" * 4
    assert set(times) == {"a", "b"}


def test_peak_memory_is_what_a_run_takes():
    """Of two copies, each holding `copy_bytes`, the inputs are there before; the run adds nothing."""
    assert peak_bytes(_filling, tokens=2**25, small=1) > 2**25
    assert peak_bytes(_copying, tokens=2**25, small=1) < 2**24


def _filling(count):
    return lambda: torch.ones(count // 2).sum()


def _copying(count):
    return copying(Sizes(copy_bytes=4 * count))


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
