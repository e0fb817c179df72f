"""Truncated backpropagation: the whole losses, gradients that stop where a tbptt chunk begins."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import recipe as recipes
from hybrid.checkpoint.folder import Origin
from hybrid.data.batch import Batch, Segment
from hybrid.distributed import world as distributed
from hybrid.distributed.context_parallel import ALONE, Inputs
from hybrid.errors import UserError
from hybrid.model import HybridLM
from hybrid.model.head import IGNORE
from hybrid.recipe import Geometry, RecipeError, layer_specs
from hybrid.recipe.schema import Recipe
from hybrid.train import resume
from hybrid.train.engine import Engine
from hybrid.train.step import Step
from hybrid.train.tbptt import ChunkReader, chunks

from ..generate.test_ragged import small
from . import tiny
from .test_step import largest_error

CPU = torch.device("cpu")


def batch_of(ids: torch.Tensor, *lengths: int) -> Batch:
    """Next-token labels; `lengths` of packed documents, whose last labels are not counted."""
    labels = ids.roll(-1, 1)
    if not lengths:
        labels[:, -1] = IGNORE
        return Batch(ids, labels, None, 0)
    borders = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    labels[0, borders[1:].long() - 1] = IGNORE
    return Batch(ids, labels, borders, 0)


def cut(batch: Batch, count: int) -> list[Inputs]:
    return list(chunks(ALONE.shard(batch), count))


def test_a_packed_row_is_cut_wherever_a_chunk_is_full():
    batch = batch_of(torch.arange(10)[None], 3, 5, 2)
    one, two, three = cut(batch, 3)
    assert [p.ids[0].tolist() for p in (one, two, three)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [p.labels.shape[1] for p in (one, two, three)] == [4, 4, 2]
    assert [p.cu_seqlens.tolist() for p in (one, two, three)] == [[0, 3, 4], [0, 4], [0, 2]]
    assert [(p.continues, p.unfinished) for p in (one, two, three)] == [
        (False, True),
        (True, False),
        (False, False),
    ]


def test_equal_rows_are_cut_together():
    batch = batch_of(torch.arange(12).view(2, 6))
    one, two = cut(batch, 2)
    assert one.ids.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert (one.cu_seqlens, one.continues, one.unfinished) == (None, False, True)
    assert (two.continues, two.unfinished) == (True, False)


def test_fewer_tokens_than_chunks_leave_chunks_without_a_counted_token():
    found = cut(batch_of(torch.arange(5)[None], 3, 2), 8)
    assert [p.ids.shape[1] for p in found] == [1] * 8
    assert [int((p.labels != IGNORE).sum()) for p in found] == [1, 1, 0, 1, 0, 0, 0, 0]
    assert [p.continues for p in found] == [False, True, True, False, True, False, False, False]


@pytest.mark.parametrize("pattern", ["KRW", "BGM", "QD"])
@pytest.mark.parametrize("lengths", [(), (5, 41, 1, 9, 4)], ids=["rows", "packed"])
def test_losses_are_those_of_the_whole_sequence(pattern, lengths):
    """Ids never repeat, so that no choice of a slot is a tie."""
    model = small(pattern)
    order = torch.randperm(320, generator=torch.Generator().manual_seed(1))
    batch = batch_of(order[:60][None] if lengths else order[:120].view(2, 60), *lengths)
    with torch.no_grad():
        right = model(batch.ids, cu_seqlens=batch.cu_seqlens, labels=batch.labels)
    for count in (1, 2, 7, 25):
        reader, total, tokens = ChunkReader(model, CPU), 0.0, 0
        for chunk in cut(batch, count):
            loss = reader.read(chunk)
            total, tokens = total + float(loss.total.detach()), tokens + int(loss.tokens)
        assert tokens == int(right.tokens)
        assert total == pytest.approx(float(right.total), rel=1e-6)


# Under the engine

CHUNKS, LENGTH, SEQUENCES = 3, 20, 4


def recipe(stage: int) -> Recipe:
    found = Recipe()
    found.model.pattern, found.model.hidden_size, found.model.vocab_size = "RKW", 16, 40
    found.model.defaults = {"num_heads": 2, "window": 4, "chunk": 4, "budget_minimum": 4}
    found.optimizer.name, found.optimizer.lr, found.optimizer.clip = "sgd", 1e3, 0.0
    found.optimizer.weight_decay = 0.0
    found.parallel.zero_stage, found.train.tbptt_chunks = stage, CHUNKS
    return found


def model() -> HybridLM:
    torch.manual_seed(0)
    section = recipe(0).model
    made = HybridLM(section, layer_specs(section))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return made


def batches(rank: int) -> list[Batch]:
    """Two micro-batches: a packed row, and one with fewer tokens than chunks. Ids do not repeat in a row."""
    generator = torch.Generator().manual_seed(5 + rank)
    rows = [torch.randperm(40, generator=generator)[:count][None] for count in (33, 2)]
    found = [batch_of(rows[0], 4 + rank, 29 - rank), batch_of(rows[1], 2)]
    return [replace(one, segments=[Segment("text", 0, 0, one.ids.numel())]) for one in found]


def in_rank(stage: int) -> tuple[float, dict[str, Any], int]:
    """One step in a rank: loss, weights, and the longest row of a forward pass."""
    world = distributed.start(1)
    engine = Engine(model(), recipe(stage), Geometry(world.size, world.size, 1, 2), world)
    engine.set_rates(1.0)
    lengths: list[int] = []
    engine.model.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    done = Step(engine, world, batches(world.rank), tbptt_chunks=CHUNKS).take()
    weights = tiny.weights(engine)
    engine.close()
    return done.loss, weights, max(lengths)


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_has_the_whole_loss_and_the_truncated_gradient(two_ranks, stage: int):
    plain, expected = model(), 0.0
    every = [batch for rank in range(2) for batch in batches(rank)]
    counted = sum(int((batch.labels != IGNORE).sum()) for batch in every)
    for batch in every:
        with torch.no_grad():
            loss = plain(batch.ids, cu_seqlens=batch.cu_seqlens, labels=batch.labels)
        expected += float(loss.total) / counted
        reader = ChunkReader(plain, CPU)
        for chunk in cut(batch, CHUNKS):
            (reader.read(chunk).total / counted).backward()
    start = dict(model().named_parameters())
    (loss, weights, longest), (other, *_) = two_ranks.run(in_rank, stage)
    assert loss == other == pytest.approx(expected, rel=1e-5)
    assert longest == 11
    found = {name: (start[name].detach() - new) / 1e3 for name, new in weights.items()}
    right = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert largest_error(found, right) < 1e-5


SETTINGS = {
    "model__pattern": "RW", "data__order": "document", "data__context": 64, "train__tbptt_chunks": 3,
    "train__batch_size": 2, "train__checkpoint_every": 2, "parallel__zero_stage": 2,
}  # fmt: skip


@pytest.mark.ranks
def test_a_run_in_chunks_resumes_exactly(two_ranks, tiny_recipe: Path, tmp_path: Path):
    two_ranks.run(tiny.run, tiny_recipe, tmp_path / "run", **SETTINGS)
    straight = tiny.series(tmp_path / "run")
    assert [line[0] for line in straight] == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_00000002")
    (again, _) = two_ranks.run(tiny.run, tiny_recipe, tmp_path / "run", **SETTINGS)
    assert again.loss == straight[-1][1]  # it had steps to do
    assert tiny.series(tmp_path / "run")[-2:] == straight[-2:]
    _, words = two_ranks.run(
        tiny.run, tiny_recipe, tmp_path / "run", **SETTINGS | {"train__tbptt_chunks": 2}
    )[0]
    assert "train.tbptt_chunks" in words


def test_a_checkpoint_of_an_earlier_version_holds_the_chunks_under_their_old_name(tiny_recipe: Path):
    found = recipes.load(tiny_recipe, ["model.pattern=W", "train.tbptt_chunks=2"])
    stored = resume.plain(found)
    stored["train"]["carry_chunks"] = stored["train"].pop("tbptt_chunks")
    origin = Origin(world_size=1, zero_stage=1, precision="fp32", recipe=stored, tokenizer="t")
    now = replace(origin, recipe=resume.plain(found))
    assert resume.check(origin, now) == [resume.NO_FINGERPRINT]
    now.recipe["train"]["tbptt_chunks"] = 4
    with pytest.raises(UserError, match=r"train\.tbptt_chunks: 2 -> 4"):
        resume.check(origin, now)


# Refusals


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["model.pattern=RWF"],
            r"tbptt_chunks.*: is 4, but layer 2 \('F', full\) keeps every token: its state has 2,\d+ bytes a "
            r"sequence after data.context 16 tokens and \d+ after a chunk",
        ),
        (["model.pattern=R", "data.context=3"], "tbptt_chunks.*: 4 chunks of data.context 3 tokens"),
        (["model.pattern=R", "train.tbptt_chunks=0"], "tbptt_chunks.* is 0; allowed: 1 or more"),
        (["model.pattern=R", "parallel.sequence=2"], "tbptt_chunks.* or sharded over ranks .*not both"),
    ],
)
def test_pieces_that_cannot_be_are_refused(tiny_recipe: Path, overrides: list[str], words: str):
    with pytest.raises(RecipeError, match=words):
        recipes.load(tiny_recipe, ["train.tbptt_chunks=4", *overrides])
    recipes.load(tiny_recipe, ["train.tbptt_chunks=4", "model.pattern=RKWBQGDM"])


def test_a_recipe_made_in_code_is_checked_too(tiny_recipe: Path):
    found = recipes.load(tiny_recipe)
    found.train.tbptt_chunks = 2
    with pytest.raises(RecipeError, match="keeps every token"):
        recipes.check(found)
