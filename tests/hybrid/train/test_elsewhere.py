"""Going on with other processes, at another ZeRO stage: one kind of checkpoint for all of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hybrid import recipe as recipes
from hybrid.checkpoint import tensor_files, zero_state
from hybrid.checkpoint.run import load_weights
from hybrid.distributed import world as distributed
from hybrid.errors import TrainError
from hybrid.model import HybridLM
from hybrid.train.engine import Engine

from . import tiny

pytestmark = pytest.mark.ranks

PLACES = {
    "fp32": [(1, 0), (1, 2), (2, 0), (2, 1), (2, 3), (4, 3)],
    "bf16": [(1, 1), (2, 2), (2, 3)],
}
"""Precision -> processes, ZeRO stage."""
WARM = {"schedule__shape": "constant", "schedule__warmup_steps": 6}


@contextlib.contextmanager
def little_at_once() -> Iterator[None]:
    """Several small files, and exchanges of few elements."""
    with (
        tiny.patched(tensor_files, "FILE_BYTES", 20_000),
        tiny.patched(zero_state, "ELEMENTS_AT_ONCE", 1_000),
    ):
        yield


def in_several_files(path: Path, output: Path, **overrides: Any) -> Any:
    """A run whose checkpoints are spread over several files, and travel between ranks little by little."""
    with (
        tiny.patched(tensor_files, "FILE_BYTES", 20_000),
        tiny.patched(zero_state, "ELEMENTS_AT_ONCE", 1_000),
    ):
        return tiny.run(path, output, **overrides)


def saved_again(run: Path, tag: str, target: Path, stage: int) -> dict[str, Any]:
    """Load a checkpoint at some stage and write what is then in the engine; returns weights and moments."""
    recipe = recipes.load(run / "recipe.yaml", [f"parallel.zero_stage={stage}"])
    world = distributed.start(1)
    engine = Engine(HybridLM.from_recipe(recipe), recipe, recipes.batch_geometry(recipe, world.size), world)
    engine.load(run / "checkpoints" / tag)
    with (
        tiny.patched(tensor_files, "FILE_BYTES", 20_000),
        tiny.patched(zero_state, "ELEMENTS_AT_ONCE", 1_000),
    ):
        for file, chunks in engine.zero_state.capture():
            tensor_files.write(target / file.name, file.header(), chunks, lambda: None)
    found = {"weights": tiny.weights(engine)}
    engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_layout_reads_and_writes_the_same_bytes(
    rank_pools, tiny_recipe: Path, tmp_path: Path, precision: str
):
    """deepspeedai/DeepSpeed#5405: fp32 masters and moments are kept bit for bit, also beside bf16
    parameters."""
    run, tag = tmp_path / "run", "step_00000004"
    rank_pools(2).run(in_several_files, tiny_recipe, run, train__precision=precision)
    written = {path.name: path.read_bytes() for path in (run / "checkpoints" / tag).glob("*.safetensors")}
    assert len(written) >= 6
    weights = load_weights(run / "checkpoints" / tag)
    assert sum(bool(weight.any()) for weight in weights.values()) > len(weights) // 2
    for processes, stage in PLACES[precision]:
        target = tmp_path / f"{processes}x{stage}"
        target.mkdir()
        found = rank_pools(processes).run(saved_again, run, tag, target, stage)
        assert {path.name: path.read_bytes() for path in target.iterdir()} == written, (processes, stage)
        for rank in found:
            assert all(weight.equal(weights[name]) for name, weight in rank["weights"].items())


@pytest.mark.parametrize(("optimizer", "source"), [("adamw", (2, 1)), ("adamw", (4, 3)), ("sgd", (2, 2))])
def test_training_goes_on_alike_on_other_processes(
    rank_pools, tiny_recipe: Path, tmp_path: Path, optimizer: str, source: tuple[int, int]
):
    """deepspeedai/DeepSpeed#3810, pytorch/torchtitan#409: every optimizer offered, with groups that decay and
    groups that do not; the same batches whatever the number of processes and of reading threads."""
    settings = {"optimizer__name": optimizer, "train__steps": 8, "train__checkpoint_every": 4, **WARM}
    processes, stage = source
    rank_pools(processes).run(tiny.run, tiny_recipe, tmp_path / "run", parallel__zero_stage=stage, **settings)
    wanted = tiny.series(tmp_path / "run")
    places = [(1, 0, 1), (1, 1, 1), (2, 3, 2), (2, 0, 1), (4, 2, 2)]  # processes, stage, ranks per sequence
    for number, (processes, stage, sequence) in enumerate(places):
        output = tmp_path / f"{processes}x{stage}"
        for name in ("checkpoints/step_00000004", "checkpoints/latest"):
            place = output / name
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if "step" in name else shutil.copy
            copy(tmp_path / "run" / name, place)
        rank_pools(processes).run(
            tiny.run, tiny_recipe, output, parallel__zero_stage=stage, parallel__sequence=sequence,
            data__workers=number % 3, **settings,
        )  # fmt: skip
        found = tiny.series(output)
        assert [line[0] for line in found] == [5, 6, 7, 8]
        for (_, loss, rate, norm, ids), (_, *before, ids_before) in zip(found, wanted[4:], strict=True):
            assert loss == pytest.approx(before[0], abs=1e-5)
            assert (rate, ids) == (before[1], ids_before)
            assert norm == pytest.approx(before[2], rel=1e-3)


def test_weights_saved_at_stage_3_start_another_run(two_ranks, tiny_recipe: Path, tmp_path: Path):
    """huggingface/transformers#20082: full tensors are saved, and the score before the first step is the
    source's."""
    source, _ = two_ranks.run(tiny.run, tiny_recipe, tmp_path / "a", parallel__zero_stage=3)
    weights = load_file(tmp_path / "a" / "checkpoints" / "step_00000004" / "model.safetensors")
    assert all(tensor.numel() for tensor in weights.values())
    settings = {"parallel__zero_stage": 3, "train__init_from": tmp_path / "a", "train__steps": 1}
    started, _ = two_ranks.run(tiny.run, tiny_recipe, tmp_path / "b", **settings)
    assert started.bits_per_byte_before == pytest.approx(source.bits_per_byte, rel=1e-6)


def live_state(run: Path) -> str:
    recipe = recipes.load(run / "recipe.yaml", ["parallel.zero_stage=3"])
    world = distributed.start(1)
    engine = Engine(HybridLM.from_recipe(recipe), recipe, recipes.batch_geometry(recipe, world.size), world)
    try:
        engine.model.state_dict()
    except TrainError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_a_partitioned_model_gives_no_empty_tensors_away(two_ranks, tiny_recipe: Path, tmp_path: Path):
    """deepspeedai/DeepSpeed#2413: the plain way to save a module is refused under ZeRO-3."""
    two_ranks.run(tiny.run, tiny_recipe, tmp_path, train__steps=1)
    for text in two_ranks.run(live_state, tmp_path):
        assert "are spread over the processes (ZeRO stage 3)" in text
