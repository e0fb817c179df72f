"""The closing table: the numbers it shows and how samples are cut."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid.evaluate import summary as closing
from hybrid.evaluate.yardsticks import Yardsticks
from hybrid.recipe.schema import MonitorSection, Recipe, TrainSection


def made(**changes):
    values = {
        "run": Path("runs/a b"),
        "steps": 1200,
        "tokens": 4_915_200,
        "skipped": 0,
        "bits_per_byte_before": 8.5,
        "bits_per_byte": 1.6,
        "same_text": True,
        "tokens_per_second": 5432.1,
        "seconds": 301.4,
        "peak_memory_bytes": 1_234_000_000,
        "samples": ("def f(",),
        **changes,
    }
    return SimpleNamespace(**values)


@pytest.fixture
def report(monkeypatch):
    def show(recipe=None, **changes):
        yardsticks = Yardsticks(bigram=2.0, strength=50, xz=1.5, tokens=115_586, bytes=377_637)
        monkeypatch.setattr(closing, "measure", lambda data, tokens, say: yardsticks)
        recipe = recipe or Recipe(train=TrainSection(yardsticks=True))
        return closing.report(recipe, made(**changes)).splitlines()

    return show


def row(lines, start):
    (found,) = [" ".join(line.split()) for line in lines if line.strip().startswith(start)]
    return found


def test_scores_stand_beside_the_yardsticks(report):
    lines = report()
    assert row(lines, "377,637") == "377,637 held-out bytes (115,586 tokens) bits per byte"
    assert row(lines, "before") == "before training 8.500"
    assert row(lines, "after") == "after step 1,200 1.600"
    assert row(lines, "token bigram") == "token bigram (m = 50) 2.000 the model needs 20.0 % less"
    assert row(lines, "xz") == "xz -9e 1.500 the model needs 6.7 % more"
    assert row(lines, "speed") == "speed 5,432 tokens/s (4,915,200 tokens trained on)"
    assert row(lines, "peak memory") == "peak memory 1.23 GB"
    assert row(lines, "run directory") == "run directory runs/a b"


def test_yardsticks_are_left_out_unless_asked_for_and_where_they_cannot_be_measured(report, monkeypatch):
    lines = report(Recipe())
    assert row(lines, "held-out text") == "held-out text bits per byte"
    assert row(lines, "after") == "after step 1,200 1.600"
    assert not any("bigram" in line or "xz" in line for line in lines)

    def fail(data, tokens, say):
        raise PermissionError(13, "Permission denied", "data/report.json")

    monkeypatch.setattr(closing, "measure", fail)
    said = []
    asked = Recipe(train=TrainSection(yardsticks=True))
    assert closing.report(asked, made(), said.append).splitlines() == lines
    assert said == ["no yardsticks: Permission denied (data/report.json)"]


def test_an_unknown_start_and_skipped_steps_are_shown(report):
    lines = report(bits_per_byte_before=math.nan, skipped=3)
    assert row(lines, "before") == "before training nan"
    assert row(lines, "skipped") == "skipped steps 3"


def test_the_tensorboard_line_can_be_pasted(report, monkeypatch, tmp_path):
    program = tmp_path / ".venv" / "bin" / "tensorboard"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.chdir(tmp_path)
    expected = "training curves .venv/bin/tensorboard --logdir 'runs/a b/tensorboard'"
    assert row(report(), "training curves") == expected
    monkeypatch.chdir(program.parent)
    assert row(report(), "training curves").split()[2] == "tensorboard"
    off = Recipe(monitor=MonitorSection(tensorboard=False))
    assert not any("tensorboard" in line for line in report(off))


def test_samples_are_cut_to_a_few_printable_lines(report):
    text = "a\tb\x1b[2J\r\n" + "x" * 150 + "\n" + "\n".join(str(n) for n in range(20))
    lines = report(samples=(text, "short"))
    start = lines.index("sample 1")
    shown = lines[start + 1 : lines.index("", start)]
    assert shown[0] == "  | a   b\ufffd[2J"
    assert shown[1] == "  | " + "x" * 99 + "…"
    assert shown[2:] == [f"  | {n}" for n in range(10)] + ["  | …"]
    assert lines[lines.index("sample 2") + 1] == "  | short"
