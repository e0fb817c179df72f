"""Layers with a state of their own in whole runs: partitioned, recomputed in the backward pass, watched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hybrid.distributed.world import World
from hybrid.train import throughput
from hybrid.train.metrics import read_metrics

from . import tiny

pytestmark = pytest.mark.ranks

# Windows of 48 tokens, so that documents outgrow KVM's window of two chunks and its slots grow.
MIXED = {
    "model__pattern": "KRWF",
    "model__layers__K__chunk": 4,
    "model__layers__K__budget_minimum": 4,
    "model__layers__K__budget_factor": 2,
    "data__context": 48,
}
STATISTICS = ("slots", "tokens_per_slot", "gate_mean", "gate_std", "state_mass", "window_mass")


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputing_layers_changes_nothing(two_ranks, tiny_recipe: Path, tmp_path: Path, stage: int):
    """Blocks that run again for the backward pass take the routes of their first run."""
    settings = MIXED | {"parallel__zero_stage": stage}
    for name, again in (("kept", "false"), ("recomputed", "true")):
        two_ranks.run(
            tiny.run, tiny_recipe, tmp_path / name, train__activation_checkpointing=again, **settings
        )
    kept, recomputed = (tiny.series(tmp_path / name) for name in ("kept", "recomputed"))
    assert [line[0] for line in kept] == [1, 2, 3, 4]
    for one, other in zip(recomputed, kept, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def watched(path: Path, output: Path, **overrides: Any) -> list[list[dict[str, float]]]:
    """A run in which rank r needs r + 1 GiB; returns all ranks' statistics, each time they were gathered."""
    gather, seen = World.gather, []

    def watching(self: World, value: Any) -> list[Any]:
        found = gather(self, value)
        if isinstance(value, dict) and "0/slots" in value:
            seen.append(found)
        return found

    needed = (1 + int(os.environ["RANK"])) * 2**30
    with (
        tiny.patched(World, "gather", watching),
        tiny.patched(throughput, "memory_bytes", lambda _: needed),
    ):
        tiny.run(path, output, **overrides)
    return seen


def test_statistics_of_kvm_layers_are_means_and_memory_the_largest_of_the_ranks(
    two_ranks, tiny_recipe: Path, tmp_path: Path
):
    """At ZeRO 3, where a layer's weights exist only while it runs."""
    settings = MIXED | {
        "model__pattern": "KFK", "monitor__statistics_every": 2, "parallel__zero_stage": 3,
    }  # fmt: skip
    seen, _ = two_ranks.run(watched, tiny_recipe, tmp_path, **settings)
    lines = [line for line in read_metrics(tmp_path) if "layers/0/slots" in line]
    assert [line["step"] for line in lines] == [2, 4]
    for line, (first, second) in zip(lines, seen, strict=True):
        assert {name for name in line if name.startswith("layers/")} == {
            f"layers/{layer}/{name}" for layer in (0, 2) for name in STATISTICS
        }
        assert first != second
        assert line["memory/peak_gib"] == 2
        for name, value in first.items():
            assert line[f"layers/{name}"] == pytest.approx((value + second[name]) / 2)
        for layer in (0, 2):
            assert 1 < line[f"layers/{layer}/slots"] < 48
            mass = line[f"layers/{layer}/state_mass"]
            assert 0 < mass < 1
            assert line[f"layers/{layer}/window_mass"] == pytest.approx(1 - mass)
