"""What is written, and that it can be read by others."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path

import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event

from hybrid.recipe.schema import MonitorSection
from hybrid.text import clock
from hybrid.train.metrics import Metrics, read_metrics
from hybrid.train.throughput import memory_bytes, peak_flops
from hybrid.train.trainer import quiet
from hybrid.train.validation import write_samples

from . import tiny
from .processes import fill, small_disk


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars by name, from the raw records of all files: what a reader without TensorBoard's rules has."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                number = value.simple_value or (value.tensor.float_val[0] if value.tensor.float_val else 0.0)
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def test_metrics_are_not_written_through_a_link(tmp_path: Path):
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "metrics.jsonl").symlink_to("mine")
    with pytest.raises(OSError, match=r"is a link, through which nothing is written: remove it.*metrics"):
        Metrics(tmp_path, MonitorSection(tensorboard=False), True, 0)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_log_is_not_written_through_a_link(tmp_path: Path):
    (tmp_path / "rank_0.log").symlink_to("mine")
    with pytest.raises(OSError, match="is a link"), quiet(tmp_path / "rank_0.log", main=True):
        pass
    assert not (tmp_path / "mine").exists()


def test_samples_that_cannot_be_made_end_no_run(tiny_recipe: Path, tmp_path: Path):
    said: list[str] = []
    recipe = tiny.load(tiny_recipe, tmp_path, train__prompts="[alpha]", train__sample_tokens=5)
    assert write_samples(tmp_path, recipe, torch.device("cpu"), said.append) == []
    assert said == [f"no samples: {tmp_path} holds no whole weights: " + said[0].partition("weights: ")[2]]


def test_one_value_a_step_after_going_back(tmp_path: Path):
    first = Metrics(tmp_path, MonitorSection(), True, 0)
    for step in range(1, 16):
        first.write(step, {"train/loss": float(step)})
    first.close()
    second = Metrics(tmp_path, MonitorSection(), True, 10)
    for step in range(11, 17):
        second.write(step, {"train/loss": 100.0 + step})
    second.close()
    wanted = [(step, float(step if step <= 10 else 100 + step)) for step in range(1, 17)]
    assert sorted(read_events(tmp_path / "tensorboard")["train/loss"]) == wanted
    assert [(line["step"], line["train/loss"]) for line in read_metrics(tmp_path)] == wanted
    both = read_metrics(tmp_path, every_run=True)
    assert len(both) == 21
    assert {line["run"] for line in both if line["step"] == 12} == {first.run, second.run}


def test_scoring_a_finished_run_again_keeps_its_last_step(tmp_path: Path):
    for values in ({"train/loss": 1.0}, {"validation/loss": 2.0}, {"validation/loss": 3.0}):
        metrics = Metrics(tmp_path, MonitorSection(tensorboard=False), True, 4)
        metrics.write(4, values)
        metrics.close()
    (line,) = read_metrics(tmp_path)
    assert (line["train/loss"], line["validation/loss"], line["run"]) == (1.0, 3.0, metrics.run)


@pytest.mark.parametrize("when", ["within the step's line", "before it was scored", "after its statistics"])
def test_a_step_taken_again_after_a_kill_has_the_later_runs_values_only(tmp_path: Path, when: str):
    """The killed run wrote some of step 5's lines, the next goes on from step 4 with other settings."""
    section = MonitorSection(tensorboard=False)
    killed = Metrics(tmp_path, section, True, 0)
    for step in (4, 5):
        killed.write(step, {"train/loss": 1.0, "train/z": 2.0})
    if when == "after its statistics":
        killed.write(5, {"validation/loss": 3.0})
        killed.write(5, {"layers/0/slots": 4.0})
    if when == "within the step's line":
        content = (tmp_path / "metrics.jsonl").read_bytes()
        (tmp_path / "metrics.jsonl").write_bytes(content[:-20])
    again = Metrics(tmp_path, section, True, 4)
    again.write(5, {"train/loss": 10.0})
    again.write(5, {"validation/loss": 30.0})
    for metrics in (killed, again):
        metrics.close()
    four, five = ({k: v for k, v in line.items() if "/" in k} for line in read_metrics(tmp_path))
    assert four == {"train/loss": 1.0, "train/z": 2.0}
    assert five == {"train/loss": 10.0, "validation/loss": 30.0}


def test_numbers_that_are_not_finite_are_told_apart_in_strict_json(tmp_path: Path):
    values = {"a/nan": math.nan, "a/up": math.inf, "a/down": -math.inf, "a/x": 1.5}
    metrics = Metrics(tmp_path, MonitorSection(), True, 0)
    metrics.write(1, values)
    metrics.close()
    (text,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = json.loads(text, parse_constant=refuse)
    assert [line[name] for name in values] == ["NaN", "Infinity", "-Infinity", 1.5]
    (line,) = read_metrics(tmp_path)
    assert [line[name] for name in values] == pytest.approx(list(values.values()), nan_ok=True)
    events = read_events(tmp_path / "tensorboard")
    assert [events[name][0][1] for name in values] == pytest.approx(list(values.values()), nan_ok=True)


def test_metrics_of_older_versions_are_read_under_todays_names(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "run": "a", "train/loss": null, "train/gradient_norm": 2.0}\n'
    )
    (line,) = read_metrics(tmp_path)
    assert line == {"step": 1, "run": "a", "train/loss": None, "train/gradient_norm_before_clipping": 2.0}


def test_a_full_disk_is_told_once_and_costs_nothing_that_fits_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """tensorflow/tensorboard's own writer ends its thread with a traceback, and with it all later curves."""
    with small_disk(tmp_path / "run", "256k"):
        metrics = Metrics(tmp_path / "run", MonitorSection(), True, 0)
        metrics.write(1, {"train/loss": 1.0})
        fill(tmp_path / "run")
        for step in range(2, 200):
            metrics.write(step, {"train/loss": float(step)})
            metrics.flush()
        (tmp_path / "run" / "filler").unlink()
        metrics.write(200, {"train/loss": 200.0})
        metrics.close()
        assert [line["train/loss"] for line in read_metrics(tmp_path / "run")] == list(range(1, 201))
        assert read_events(tmp_path / "run" / "tensorboard")["train/loss"][-1] == (200, 200.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"could not write what is logged: No space .*\(.*\); training goes on without", line)


def test_values_of_one_step_are_merged_and_a_cut_line_is_left_out(tmp_path: Path):
    monitor = Metrics(tmp_path, MonitorSection(tensorboard=False), True, 0)
    monitor.write(1, {"a/x": 1.0})
    monitor.write(1, {"a/y": float("nan")})
    monitor.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ru')
    (line,) = read_metrics(tmp_path)
    assert line["a/x"] == 1.0
    assert math.isnan(line["a/y"])


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monitor = Metrics(tmp_path, MonitorSection(), False, 0)
    monitor.write(1, {"a/x": 1.0})
    monitor.say("hello")
    monitor.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_durations_memory_and_peaks():
    assert clock(3725.4) == "1:02:05"
    assert memory_bytes(torch.device("cpu")) > 50e6
    assert peak_flops(MonitorSection(peak_tflops=2.0), torch.device("cpu"), "fp32") == 2e12
    assert 1e8 < peak_flops(MonitorSection(), torch.device("cpu"), "fp32") < 1e14


@pytest.mark.ranks
def test_four_ranks_write_one_series(four_ranks, rank_pools, tiny_recipe: Path, tmp_path: Path):
    """tensorflow/tensorboard#1011: 20 steps, 20 points a series, and the values are means over all ranks
    (those of one process)."""
    settings = {"train__steps": 20, "monitor__tensorboard": "true", "monitor__statistics_every": 10}
    four_ranks.run(tiny.run, tiny_recipe, tmp_path / "four", **settings)
    rank_pools(1).run(tiny.run, tiny_recipe, tmp_path / "one", **settings)
    assert len(list((tmp_path / "four" / "tensorboard").iterdir())) == 1
    four, one = (read_events(tmp_path / name / "tensorboard") for name in ("four", "one"))
    for name in ("train/loss", "train/gradient_norm_before_clipping", "train/learning_rate"):
        assert [step for step, _ in four[name]] == list(range(1, 21))
        assert [value for _, value in four[name]] == pytest.approx(
            [value for _, value in one[name]], rel=1e-4
        )
    largest = [value for _, value in four["train/loss_largest"]]
    assert all(a > b for a, (_, b) in zip(largest, four["train/loss"], strict=True))
    for name in ("train/clip_factor", "train/skipped", "train/tokens", "speed/tokens_per_second",
                 "speed/data_wait", "speed/step_seconds", "memory/peak_gib", "speed/tflops",
                 "speed/utilisation"):  # fmt: skip
        assert len(four[name]) == 20
    assert [step for step, _ in four["validation/bits_per_byte"]] == [0, 20]
    assert four["train/tokens"][-1][1] == 20 * 4 * 16


@pytest.mark.ranks
def test_resuming_an_older_step_replaces_the_curve(rank_pools, tiny_recipe: Path, tmp_path: Path):
    """tensorflow/tensorboard#3732, with 15, 10 and 16 steps for 150, 100 and 160."""
    one = rank_pools(1)
    settings = {"train__checkpoint_every": 5, "monitor__tensorboard": "true", "schedule__shape": "constant"}
    one.run(tiny.run, tiny_recipe, tmp_path, train__steps=15, **settings)
    first = dict(read_events(tmp_path / "tensorboard")["train/loss"])
    changed = settings | {"optimizer__lr": 0.03, "train__resume": "step_00000010"}
    one.run(tiny.run, tiny_recipe, tmp_path, train__steps=16, **changed)
    points = sorted(read_events(tmp_path / "tensorboard")["train/loss"])
    assert [step for step, _ in points] == list(range(1, 17))
    after = dict(points)
    assert [after[step] for step in range(1, 12)] == [first[step] for step in range(1, 12)]
    assert all(after[step] != first[step] for step in range(12, 16))
    text = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len({line["run"] for line in text if line["step"] == 13}) == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest", "step_00000010", "step_00000015", "step_00000016",
    ]  # fmt: skip


def test_a_line_cut_by_a_crash_costs_no_later_one(tmp_path: Path):
    """What was written before and after it is all there, whatever bytes stand between."""
    section = MonitorSection(tensorboard=False)
    for step, rubbish in ((1, b'{"step": 2, "ru'), (3, b"\xff\n[]\n3")):
        monitor = Metrics(tmp_path, section, True, step - 1)
        monitor.write(step, {"train/loss": float(step)})
        monitor.close()
        with open(tmp_path / "metrics.jsonl", "ab") as file:
            file.write(rubbish)
    monitor = Metrics(tmp_path, section, True, 3)
    monitor.write(4, {"train/loss": 4.0})
    monitor.close()
    assert [line["train/loss"] for line in read_metrics(tmp_path)] == [1.0, 3.0, 4.0]
