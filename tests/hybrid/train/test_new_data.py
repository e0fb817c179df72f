"""A run knows what it is trained on: other data than a checkpoint's are refused, or accepted and told."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hybrid.checkpoint.folder import MANIFEST, TRAINER, Origin, read_trainer
from hybrid.data.preparation.prepare import prepare
from hybrid.errors import TrainError
from hybrid.evaluate.summary import report
from hybrid.files import sha256, write_json
from hybrid.train import resume
from hybrid.train.metrics import read_metrics

from . import tiny
from .test_train import printed


def source(**changes: Any) -> dict[str, Any]:
    known = {"documents": 9, "tokens": 90, "held_out": 1, "weight": 1.0}
    return {**known, "fingerprint": "f" * 64, "held_out_fingerprint": "h" * 64, **changes}


def origin(accept: bool = False, **sources: dict[str, Any]) -> Origin:
    recipe = {"data": {"folder": "d"}, "train": {"accept_new_data": accept}}
    return Origin(1, 1, "fp32", "t", recipe, sources)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, {"a": source(fingerprint="g" * 64)}, r"source 'a' holds other text: 9 documents .* -> 9 doc"),
        ({}, {"b": source(weight=3.0)}, r"data\.sources\.b\.weight: 1 -> 3"),
        ({}, {"b": source(held_out=4, held_out_fingerprint="i")}, r"'b' has other held-out .*: 1 -> 4"),
        ({"c": source()}, {}, r"the sources, in order: a, b, c -> a, b"),
        ({}, {"c": source()}, r"the sources, in order: a, b -> a, b, c"),
    ],
)
def test_a_difference_is_refused_by_name_or_accepted_and_told(before, after, words: str) -> None:
    both = {"a": source(), "b": source()}
    was, now = origin(**both | before), {**both, **after}
    assert resume.check(was, origin(**both | before)) == []
    expected = rf"differs from what .*{words}.*train\.accept_new_data=true"
    with pytest.raises(TrainError, match=expected) as refused:
        resume.check(was, origin(**now))
    (told,) = resume.check(was, origin(accept=True, **now))
    assert told in str(refused.value)


def test_sources_in_another_order_are_other_data() -> None:
    """Rows are mixed by a source's place among them."""
    was = origin(a=source(), b=source())
    with pytest.raises(TrainError, match="the sources, in order: a, b -> b, a"):
        resume.check(was, origin(b=source(), a=source()))


def test_a_run_goes_on_with_other_data_only_when_told_to(rank_pools, tiny_recipe: Path, tmp_path: Path):
    pool, run = rank_pools(1), tmp_path / "run"
    model = str(tiny_recipe.parent / "data" / "tokenizer.model")
    tiny.write_text(tmp_path / "text.jsonl", 70)
    same = {"data__tokenizer": model, "data__folder": tmp_path / "same"}
    other = {**same, "data__folder": tmp_path / "other"}
    other["data__sources__text__paths"] = f"[{tmp_path}/text.jsonl]"
    pool.run(tiny.run, tiny_recipe, run, train__steps=1)
    (moved,) = pool.run(tiny.run, tiny_recipe, run, train__steps=2, **same)
    assert (moved.steps, moved.same_text) == (2, True)
    (refused,) = pool.run(tiny.run, tiny_recipe, run, train__steps=3, **other)
    assert refused[0] == "TrainError"
    assert "source 'text' holds other text: 60 documents" in refused[1]
    (text,) = pool.run(printed, tiny_recipe, run, train__steps=3, train__accept_new_data="true", **other)
    assert "changed since the checkpoint: source 'text' holds other text: 60 documents" in text
    (gone_on,) = pool.run(tiny.run, tiny_recipe, run, train__steps=4, **other)
    assert (gone_on.steps, gone_on.same_text) == (4, False)
    assert math.isfinite(gone_on.bits_per_byte_before)
    table = report(tiny.load(tiny_recipe, run, **other), gone_on)
    assert "before training              -  left out: its held-out text was another one" in table
    texts = [line["validation/text"] for line in read_metrics(run) if "validation/text" in line]
    assert [texts[0] == text for text in texts] == [True, True, True, False, False]
    (back,) = pool.run(tiny.run, tiny_recipe, run, train__steps=5, **same)
    assert "holds other text: 70 documents" in back[1]


def test_another_cap_on_the_scored_text_leaves_the_first_score_out(
    rank_pools, tiny_recipe: Path, tmp_path: Path
):
    pool = rank_pools(1)
    pool.run(tiny.run, tiny_recipe, tmp_path, train__steps=1)
    (summary,) = pool.run(tiny.run, tiny_recipe, tmp_path, train__steps=2, train__eval_tokens=10)
    assert not summary.same_text


def test_a_checkpoint_of_an_earlier_version_is_accepted_and_told_once(
    rank_pools, tiny_recipe: Path, tmp_path: Path
):
    pool = rank_pools(1)
    pool.run(tiny.run, tiny_recipe, tmp_path, train__steps=1)
    tag = tmp_path / "checkpoints" / "step_00000001"
    progress, made_by = map(asdict, read_trainer(tag))
    del progress["text_before"], made_by["data"]
    write_json(tag / TRAINER, {"progress": progress, "origin": made_by})
    manifest = json.loads((tag / MANIFEST).read_text())
    found = {"bytes": (tag / TRAINER).stat().st_size, "sha256": sha256(tag / TRAINER)}
    manifest["files"][TRAINER] = found
    write_json(tag / MANIFEST, manifest)
    (refused,) = pool.run(tiny.run, tiny_recipe, tmp_path, train__steps=2, data__sources__text__weight=2)
    assert "data.sources.text.weight: 1.0 -> 2.0" in refused[1]
    (text,) = pool.run(printed, tiny_recipe, tmp_path, train__steps=2)
    assert resume.NO_FINGERPRINT in text
    (text,) = pool.run(printed, tiny_recipe, tmp_path, train__steps=3)
    assert "step 3/3" in text
    assert resume.NO_FINGERPRINT not in text


def test_a_damaged_shard_stops_a_run_on_all_ranks(two_ranks, tmp_path: Path):
    path = tiny.prepare(tmp_path)
    (shard,) = (tmp_path / "data").glob("*/*.tokens")
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    main, other = two_ranks.run(tiny.run, path, tmp_path / "run", train__steps=1)
    assert main[0] == "DataError"
    assert f"{shard} has other contents than were written" in main[1]
    assert other == ("SystemExit", "2")
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    prepare(tiny.load(path, tmp_path / "run").data, processes=1, force=True)
    (summary, _) = two_ranks.run(tiny.run, path, tmp_path / "run", train__steps=1)
    assert summary.steps == 1


def test_a_shard_found_damaged_while_training_stops_it_after_that_step(
    rank_pools, tiny_recipe: Path, tmp_path: Path
):
    (found,) = rank_pools(1).run(found_late, tiny_recipe, tmp_path)
    assert found[0] == "DataError"
    assert "bad.tokens; checkpoints after step 0 may have learned from it" in found[1]
    assert [line["step"] for line in read_metrics(tmp_path) if "train/loss" in line] == [1, 2]


def found_late(path: Path, output: Path) -> Any:
    """The check of the shards ends after two steps."""
    from hybrid.data.checksums import ShardCheck
    from hybrid.errors import DataError

    calls: list[float | None] = []

    def over(self: ShardCheck, wait: float | None = 0.0) -> bool:
        calls.append(wait)
        if len(calls) > 2:
            self.fault = DataError("bad.tokens")
        return len(calls) > 2

    with tiny.patched(ShardCheck, "over", over):
        return tiny.run(path, output, train__steps=9)
