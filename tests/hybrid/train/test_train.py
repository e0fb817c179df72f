"""Whole runs in ranks: repeating, resuming, signals, disagreement, writers."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.checkpoint.folder import tags_in
from hybrid.checkpoint.run import load_run, newest_weights, opened
from hybrid.distributed.signals import Signals
from hybrid.errors import STOPPED_EXIT_CODE, TrainError
from hybrid.train.metrics import read_metrics
from hybrid.train.trainer import quiet

from . import tiny
from .processes import started

pytestmark = pytest.mark.ranks

LONG = {"schedule__shape": "constant", "schedule__warmup_steps": 30}


def signalled(path: Path, output: Path, step: int, rank: int, number: int, **overrides: Any) -> Any:
    """A run in which one rank gets a signal while it takes a step."""
    from hybrid.train.hooks import SignsOfLife

    true_before_step = SignsOfLife.before_step

    def before_step(hook: Any, run: Any) -> None:
        if run.progress.step + 1 == step and run.world.rank == rank:
            os.kill(os.getpid(), number)
        true_before_step(hook, run)

    with tiny.patched(SignsOfLife, "before_step", before_step):
        return tiny.run(path, output, **overrides)


@pytest.mark.parametrize("world", [1, 2])
def test_a_stopped_run_goes_on_exactly(rank_pools, tiny_recipe: Path, tmp_path: Path, world: int):
    """pytorch/torchtitan#809: 40 steps, against 20, SIGTERM to one rank only, and 20 more; warm-up still on
    at 20."""
    pool = rank_pools(world)
    straight = pool.run(tiny.run, tiny_recipe, tmp_path / "straight", train__steps=40, **LONG)
    stopped = pool.run(
        signalled, tiny_recipe, tmp_path / "halves", 20, world - 1, signal.SIGTERM, train__steps=40, **LONG
    )
    assert stopped == [("SystemExit", "75")] * world
    assert tags_in(tmp_path / "halves" / "checkpoints") == ["step_00000020"]
    halves = pool.run(tiny.run, tiny_recipe, tmp_path / "halves", train__steps=40, **LONG)
    assert tiny.series(tmp_path / "halves") == tiny.series(tmp_path / "straight")
    assert len(tiny.series(tmp_path / "halves")) == 40
    assert halves[0].bits_per_byte == straight[0].bits_per_byte
    assert halves[0].bits_per_byte_before == straight[0].bits_per_byte_before
    assert len({line["run"] for line in read_metrics(tmp_path / "halves")}) == 2


OTHER_STAGES = [("fp32", 0), ("fp32", 2), ("fp32", 3), ("bf16", 1), ("bf16", 2), ("bf16", 3)]


@pytest.mark.parametrize(("precision", "stage"), OTHER_STAGES)
def test_resuming_is_exact_at_every_stage(
    two_ranks, tiny_recipe: Path, tmp_path: Path, precision: str, stage: int
):
    """deepspeedai/DeepSpeed#943 too: two processes on CPUs train five steps at this stage."""
    settings = {"parallel__zero_stage": stage, "train__precision": precision, "train__steps": 5}
    two_ranks.run(tiny.run, tiny_recipe, tmp_path, train__checkpoint_every=3, **settings)
    before = tiny.series(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000005")
    two_ranks.run(tiny.run, tiny_recipe, tmp_path, **settings)
    assert tiny.series(tmp_path) == before
    assert [line["step"] for line in read_metrics(tmp_path, every_run=True)].count(4) == 2
    model, _, _ = load_run(tmp_path)
    assert all(
        bool(weight.isfinite().all()) and weight.dtype == torch.float32 for weight in model.parameters()
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_one_process_trains_like_two_and_like_any_split(
    rank_pools, tiny_recipe: Path, tmp_path: Path, stage: int
):
    """deepspeedai/DeepSpeed#943, and the loader's promise: the same windows whatever the number of
    processes and the split."""
    for world, micro in ((1, 4), (1, 1), (2, 2)):
        rank_pools(world).run(
            tiny.run,
            tiny_recipe,
            tmp_path / f"{world}x{micro}",
            parallel__zero_stage=stage,
            train__micro_batch_size=micro,
        )
    one, cut, two = (tiny.series(tmp_path / name) for name in ("1x4", "1x1", "2x2"))
    for other in (cut, two):
        for (_, loss, rate, norm, ids), (_, *wanted, wanted_ids) in zip(other, one, strict=True):
            assert (loss, rate, norm) == pytest.approx(wanted, rel=1e-4)
            assert ids == wanted_ids
    # allenai/open-instruct#1498: a step always reads a whole batch, so nothing is left over.
    trainer = json.loads((tmp_path / "1x1/checkpoints/step_00000004/trainer.json").read_text())
    assert (trainer["progress"]["sample"], trainer["progress"]["tokens"]) == (16, 256)


def test_a_request_to_save_reaches_all_ranks(four_ranks, tiny_recipe: Path, tmp_path: Path):
    """deepspeedai/DeepSpeed#2993: SIGUSR1 to one of four ranks: all save, and training goes on to its end."""
    found = four_ranks.run(signalled, tiny_recipe, tmp_path, 2, 3, signal.SIGUSR1)
    assert [summary.steps for summary in found] == [4] * 4
    assert tags_in(tmp_path / "checkpoints") == ["step_00000002", "step_00000004"]


def blind(path: Path, output: Path, rank: int) -> Any:
    """`rank` does not see the checkpoints."""
    from hybrid.checkpoint import folder as checkpoint

    seen = (lambda _: []) if os.environ["RANK"] == str(rank) else checkpoint.tags_in
    with tiny.patched(checkpoint, "tags_in", seen):
        return tiny.run(path, output)


@pytest.mark.parametrize(("size", "lost"), [(2, 1), (4, 2), (4, 0)])
def test_ranks_that_see_different_checkpoints_all_stop(
    rank_pools, tiny_recipe: Path, tmp_path: Path, size: int, lost: int
):
    """KempnerInstitute/KempnerForge#49: one message, on the main rank, also where that is the one without a
    view; nothing is trained."""
    rank_pools(size).run(tiny.run, tiny_recipe, tmp_path, train__steps=1)
    main, *others = rank_pools(size).run(blind, tiny_recipe, tmp_path, lost)
    views = "; ".join(f"rank {r}: {'none' if r == lost else 'step_00000001'}" for r in range(size))
    assert main[0] == "TrainError"
    assert f"disagree about the checkpoints they see: {views}" in main[1]
    assert others == [("SystemExit", "2")] * (size - 1)
    assert tiny.logged_steps(tmp_path) == 1


def different(path: Path, output: Path) -> Any:
    return tiny.run(path, output, optimizer__lr=0.1 if os.environ["RANK"] == "0" else 0.2)


def test_ranks_with_different_recipes_all_stop(two_ranks, tiny_recipe: Path, tmp_path: Path):
    main, other = two_ranks.run(different, tiny_recipe, tmp_path)
    assert main[0] == "TrainError"
    assert "disagree about the recipe" in main[1]
    assert other == ("SystemExit", "2")


_opened: list[str] | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | os.PathLike):
        path, _, flags = arguments
        if flags & os.O_ACCMODE != os.O_RDONLY:
            _opened.append(os.fspath(path))


def recorded(path: Path, output: Path) -> list[str]:
    """Names of files below the run directory that this rank opened for writing, without the temporary ones'
    additions."""
    global _opened, _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _opened = []
    tiny.run(path, output, monitor__tensorboard="true")
    found, _opened = _opened, None
    names = [Path(name).name for name in found if Path(name).is_relative_to(output)]
    return [re.sub(r"^\.(.+)\.\w+\.partial$", r"\1", name) for name in names]


def test_every_shared_file_has_one_writer(two_ranks, tiny_recipe: Path, tmp_path: Path):
    """NVIDIA-NeMo/RL#3504: the second rank writes its log and its share of the files, nothing else."""
    main, other = two_ranks.run(recorded, tiny_recipe, tmp_path)
    assert set(other) <= {"rank_1.log", "optimizer.safetensors"}
    assert "optimizer.safetensors" in other
    assert {"metrics.jsonl", "recipe.yaml", "latest", "model.safetensors"} <= set(main)


def diverging(path: Path, output: Path, limit: int) -> Any:
    """Rank 1's losses are nan from the third step on."""
    from hybrid.train.engine import Engine

    true_forward, calls = Engine.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        loss = true_forward(*args, **kwargs)
        bad = len(calls) > 2 and os.environ["RANK"] == "1"
        return loss._replace(total=loss.total + math.nan) if bad else loss

    with tiny.patched(Engine, "forward", forward):
        return tiny.run(path, output, train__steps=9, train__max_skipped=limit)


def test_training_that_keeps_diverging_stops_and_names_the_batch(
    two_ranks, tiny_recipe: Path, tmp_path: Path
):
    main, other = two_ranks.run(diverging, tiny_recipe, tmp_path, 2)
    assert main[0] == "TrainError"
    # Steps 3, 4 and 5 were skipped; rank 1 reads the later two of a step's four windows.
    assert "3 steps in a row were skipped (train.max_skipped=2), the last, step 5" in main[1]
    assert "non-finite loss on rank 1" in main[1]
    assert "the windows from sample 18, documents text[" in main[1]
    assert other == ("SystemExit", "2")
    lines = [line for line in read_metrics(tmp_path) if "train/loss" in line]
    assert [line["train/skipped"] for line in lines] == [0, 0, 1, 2]
    assert math.isnan(lines[2]["train/loss"])


def test_batches_that_do_not_divide_are_refused_at_once(two_ranks, tiny_recipe: Path, tmp_path: Path):
    """deepspeedai/DeepSpeed#3982: 8 = 2 x 2 x 2 passes, 12 in micro-batches of 4 does not; all numbers are
    shown."""
    passed = two_ranks.run(
        tiny.run, tiny_recipe, tmp_path / "a", train__batch_size=8, train__micro_batch_size=2, train__steps=1
    )
    assert [summary.tokens for summary in passed] == [8 * 16] * 2
    main, other = two_ranks.run(
        tiny.run, tiny_recipe, tmp_path / "b", train__batch_size=12, train__micro_batch_size=4
    )
    assert main[0] == "RecipeError"
    for number in ("12 sequences", "2 processes", "2 x 4 = 8", "12 / 8 = 1.5"):
        assert number in main[1]
    assert other == ("SystemExit", "2")
    assert not (tmp_path / "b").exists()


def test_a_recipe_may_change_in_harmless_keys_only(rank_pools, tiny_recipe: Path, tmp_path: Path):
    one = rank_pools(1)
    one.run(tiny.run, tiny_recipe, tmp_path, train__steps=1)
    (refused,) = one.run(
        tiny.run, tiny_recipe, tmp_path, train__steps=2, model__hidden_size=32, data__boundaries="cross"
    )
    assert refused[0] == "TrainError"
    assert "model.hidden_size: 16 -> 32" in refused[1]
    assert "data.boundaries: 'respect' -> 'cross'" in refused[1]
    (gone_on,) = one.run(
        tiny.run, tiny_recipe, tmp_path, train__steps=2, train__micro_batch_size=1, monitor__log_every=2
    )
    assert gone_on.steps == 2
    (again,) = one.run(tiny.run, tiny_recipe, tmp_path, train__steps=2)
    assert (again.steps, again.loss) == (2, None)
    assert again.bits_per_byte == gone_on.bits_per_byte


def test_weights_alone_start_another_run(rank_pools, tiny_recipe: Path, tmp_path: Path):
    """With another context, schedule and window; the step-0 score is the source's."""
    one = rank_pools(1)
    (source,) = one.run(tiny.run, tiny_recipe, tmp_path / "source", train__steps=3)
    (started,) = one.run(
        tiny.run,
        tiny_recipe,
        tmp_path / "new",
        train__init_from=tmp_path / "source",
        schedule__shape="cosine",
    )
    assert started.bits_per_byte_before == source.bits_per_byte
    assert started.steps == 4
    (wider,) = one.run(
        tiny.run, tiny_recipe, tmp_path / "wider", train__init_from=tmp_path / "source", data__context=32,
        model__layers__W__window=12,
    )  # fmt: skip
    assert wider.steps == 4
    weights = load_file(newest_weights(tmp_path / "source") / "model.safetensors")
    weights["surplus"] = weights.pop("norm.weight")
    (tmp_path / "broken").mkdir()
    save_file(weights, tmp_path / "broken" / "model.safetensors")
    (refused,) = one.run(tiny.run, tiny_recipe, tmp_path / "bad", train__init_from=tmp_path / "broken")
    assert refused[0] == "TrainError"
    assert "missing: norm.weight" in refused[1]
    assert "not in this model: surplus" in refused[1]


def test_another_tokenizer_is_refused_wherever_weights_are_read(
    rank_pools, tiny_recipe: Path, tmp_path: Path
):
    """The same ids mean other pieces: going on, starting from weights alone and generating all stop."""
    one, other = rank_pools(1), {"data__folder": tmp_path / "data", "data__vocab_size": 290}
    one.run(tiny.run, tiny_recipe, tmp_path / "run", train__steps=1)
    (gone_on,) = one.run(tiny.run, tiny_recipe, tmp_path / "run", train__steps=2, **other)
    (started,) = one.run(tiny.run, tiny_recipe, tmp_path / "new", train__init_from=tmp_path / "run", **other)
    assert (gone_on[0], started[0]) == ("TrainError", "TrainError")
    assert "the checkpoint's tokenizer has fingerprint" in gone_on[1]
    assert "were trained with another tokenizer" in started[1]
    assert not (tmp_path / "new" / "checkpoints").exists()
    load_run(tmp_path / "run")
    shutil.copy(tmp_path / "data" / "tokenizer.model", tmp_path / "run" / "tokenizer.model")
    with pytest.raises(TrainError, match="trained with another tokenizer"):
        load_run(tmp_path / "run")


def test_a_run_directory_is_complete(rank_pools, tiny_recipe: Path, tmp_path: Path):
    (summary,) = rank_pools(1).run(
        tiny.run, tiny_recipe, tmp_path, train__prompts="[alpha]", train__sample_tokens=5
    )
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "tokenizer.model",
        "samples.txt",
        "logs",
    }
    assert (tmp_path / "samples.txt").read_text() == summary.samples[0] + "\n"
    assert summary.samples[0].startswith("alpha")
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] == metadata.version("torch")
    assert (environment["processes"], environment["threads"]) == (1, 1)
    model, tokenizer, recipe = load_run(tmp_path)
    assert model.embedding.weight.shape == (recipe.model.vocab_size, 16)
    assert recipe.model.vocab_size >= tokenizer.vocab_size
    # Training from the written recipe repeats the run.
    (again,) = rank_pools(1).run(tiny.run, tmp_path / "recipe.yaml", tmp_path / "again")
    assert tiny.series(tmp_path / "again") == tiny.series(tmp_path)
    assert again.samples == summary.samples


def test_what_layers_compute_slowly_is_said_once(tiny_recipe: Path, tmp_path: Path):
    """By the main rank alone, and in every rank's log."""
    wide = {"model__hidden_size": 264, "model__defaults.num_heads": 1, "train__steps": 2}
    with started(tiny_recipe, tmp_path / "run", 2, tmp_path / "log", **wide) as ranks:
        assert ranks.exit_codes(60) == [0, 0], ranks.said()
    assert ranks.said().count("note: heads of 264 features do not fit") == 1
    assert ranks.said().count("264") == 1
    logs = [path.read_text() for path in (tmp_path / "run" / "logs").iterdir()]
    assert [log.count("SlowPathWarning") for log in logs] == [1, 1]


def test_messages_that_a_full_disk_does_not_take_end_no_run(tmp_path: Path, capfd):
    with quiet(tmp_path / "logs" / "rank_0.log", main=True):
        (tmp_path / "logs").rename(tmp_path / "gone")
        warnings.warn("nobody needs this", stacklevel=1)
        logging.getLogger("torch").error("nor this")
    assert capfd.readouterr() == ("", "")


def test_a_second_run_in_the_same_directory_is_refused(rank_pools, tiny_recipe: Path, tmp_path: Path):
    with opened(tmp_path):
        (refused,) = rank_pools(1).run(tiny.run, tiny_recipe, tmp_path)
    assert refused[0] == "TrainError"
    assert "another process is training" in refused[1]


def test_data_that_is_not_there_is_prepared_once_for_all(two_ranks, tiny_recipe: Path, tmp_path: Path):
    found = two_ranks.run(
        tiny.run, tiny_recipe, tmp_path / "run", data__folder=tmp_path / "data", train__steps=1
    )
    assert [summary.steps for summary in found] == [1, 1]
    assert (tmp_path / "data" / "report.json").is_file()


def printed(path: Path, output: Path, **overrides: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        tiny.run(path, output, **overrides)
    return text.getvalue()


def test_text_that_changed_since_it_was_prepared_is_told(rank_pools, tmp_path: Path):
    path, pool = tiny.prepare(tmp_path), rank_pools(1)
    (text,) = pool.run(printed, path, tmp_path / "run", train__steps=1)
    assert "have changed" not in text
    tiny.write_text(tmp_path / "text.jsonl", 61)
    (text,) = pool.run(printed, path, tmp_path / "run", train__steps=2)
    assert "text.jsonl changed since it was prepared (" in text
    (tmp_path / "text.jsonl").unlink()  # only there where it was prepared
    (text,) = pool.run(printed, path, tmp_path / "run", train__steps=3)
    assert "have changed" not in text
    assert "step 3/3" in text


def test_without_held_out_text_a_run_reports_no_score(rank_pools, tiny_recipe: Path, tmp_path: Path):
    """Not 0.0, which would read as a perfect one."""
    from hybrid.evaluate.summary import report

    changes = {
        "data__folder": tmp_path / "data",
        "data__sources__text__validation": 0,
        "train__eval_every": 2,
    }
    (summary,) = rank_pools(1).run(tiny.run, tiny_recipe, tmp_path / "run", **changes)
    assert summary.steps == 4
    assert math.isnan(summary.bits_per_byte)
    assert math.isnan(summary.validation_loss)
    assert not any("validation/loss" in line for line in read_metrics(tmp_path / "run"))
    recipe = tiny.load(tiny_recipe, tmp_path / "run", **changes)
    assert "bits per byte" not in report(recipe, summary)
    assert "tokens trained on" in report(recipe, summary)


def test_sigterm_ends_a_preparation_at_once_and_a_step_at_its_end():
    with Signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.stop
        signals.at_once = True
        with pytest.raises(SystemExit) as stopped:
            signal.raise_signal(signal.SIGTERM)
    assert stopped.value.code == STOPPED_EXIT_CODE
