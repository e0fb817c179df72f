"""`train.teacher` and `train.distill`: losses by hand, stages under the real engine, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybrid import recipe as recipes
from hybrid.checkpoint.folder import Origin
from hybrid.checkpoint.run import load_run, load_weights
from hybrid.data.batch import Batch
from hybrid.errors import TrainError
from hybrid.layers import Context
from hybrid.model import HybridLM
from hybrid.model.head import IGNORE
from hybrid.recipe import RecipeError, layer_specs
from hybrid.recipe.schema import ModelSection, StageSection
from hybrid.train import resume
from hybrid.train.distill import Objective, Objectives
from hybrid.train.metrics import read_metrics

from . import tiny

# The losses


def small(pattern: str, seed: int, **options: Any) -> HybridLM:
    torch.manual_seed(seed)
    layers = {"K": {"chunk": 4, "budget_minimum": 4}, "W": {"window": 4}}
    section = ModelSection(
        pattern=pattern, hidden_size=16, vocab_size=40, defaults={"num_heads": 2}, layers=layers, **options
    )
    made = HybridLM(section, layer_specs(section))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return made


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 40, (1, 30), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[:, ::4] = IGNORE
    return ids, labels, torch.tensor([0, 11, 30], dtype=torch.int32)


def test_kl_is_that_of_whole_logits_whatever_the_chunk():
    student, teacher = small("KW", 0), small("FRF", 1, logit_softcap=5.0)
    ids, labels, borders = tokens()
    with torch.no_grad():
        wanted = teacher(ids, cu_seqlens=borders)[0].softmax(-1)
    logits = student(ids, cu_seqlens=borders)[0]
    plain = (wanted * (wanted.log() - logits.log_softmax(-1))).sum(-1)[labels != IGNORE].sum()
    right = torch.autograd.grad(plain, list(student.blocks.parameters()), allow_unused=True)
    for student.loss_chunk in (7, 100):
        out = student(ids, cu_seqlens=borders, labels=labels, lesson=teacher.teach(ids, cu_seqlens=borders))
        assert out.kl.item() == pytest.approx(plain.item(), rel=1e-5)
        assert out.total.item() == student(ids, cu_seqlens=borders, labels=labels).total.item()
        found = torch.autograd.grad(out.kl, list(student.blocks.parameters()), allow_unused=True)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_are_fed_by_the_teacher_and_compared_with_its_own(checkpointing: bool):
    student, teacher = small("KW", 0), small("FW", 1)
    student.activation_checkpointing = checkpointing
    ids, labels, borders = tokens()
    lesson = teacher.teach(ids, cu_seqlens=borders, streams=True)
    assert lesson.streams is not None
    assert [stream.shape for stream in lesson.streams] == [(1, 30, 16)] * 3
    torch.testing.assert_close(lesson.hidden, teacher.norm(lesson.streams[-1]))
    out = student(ids, cu_seqlens=borders, labels=labels, lesson=lesson)
    context, streams, errors = Context.of(ids, borders, want_state=False), lesson.streams, []
    for block, x, wanted in zip(student.blocks, streams, streams[1:], strict=False):
        wrong = (block(x, streams[0], context)[0] - wanted).square().mean(-1)
        relative = wrong / ((wanted - x).square().mean(-1) + 1e-6)
        errors.append(relative[labels != IGNORE].sum().item())
    assert out.hidden.item() == pytest.approx(sum(errors) / 2, rel=1e-5)
    out.hidden.backward()
    assert all(p.grad is None for p in (student.embedding.weight, student.head.weight, student.norm.weight))
    assert student.blocks[0].mixer.c_q.weight.grad.abs().sum() > 0
    student.blocks[0].requires_grad_(False)
    again = student(ids, cu_seqlens=borders, labels=labels, lesson=lesson)
    assert again.hidden.item() == pytest.approx(errors[1], rel=1e-5)


def test_a_student_like_its_teacher_has_nothing_to_learn():
    student, teacher = small("KRW", 3), small("KRW", 3)
    ids, labels, borders = tokens()
    for streams in (False, True):
        lesson = teacher.teach(ids, cu_seqlens=borders, streams=streams)
        out = student(ids, cu_seqlens=borders, labels=labels, lesson=lesson)
        assert abs((out.hidden if streams else out.kl).item()) < 1e-4


def test_windows_are_cut_in_rows_of_the_stages_context():
    objective = Objective(StageSection(ce=1.0, context=4))
    equal = Batch(torch.arange(16).view(2, 8), torch.arange(16).view(2, 8), None, 0)
    assert objective.rows(equal).ids.tolist() == torch.arange(16).view(4, 4).tolist()
    packed = Batch(torch.arange(16)[None], torch.arange(16)[None], torch.tensor([0, 3, 8, 16]).int(), 0)
    assert objective.rows(packed).cu_seqlens.tolist() == [0, 3, 4, 8, 12, 16]
    assert objective.rows(packed).cu_seqlens.dtype == torch.int32


# Under the engine

TEACHER = {"model__pattern": "FF", "train__steps": 30, "optimizer__lr": "2e-2", "train__batch_size": 8}
STUDENT = {
    "model__pattern": "FK", "model__layers": "{K: {chunk: 4, budget: fixed, budget_minimum: 4}}",
    "train__only": "[K.*, embedding.weight, head.weight]", "train__steps": 12, "optimizer__lr": "1e-2",
    "train__distill":
        "{align: {steps: 5, hidden: 1, context: 8}, logits: {steps: 5, kl: 1}, text: {ce: 1, kl: 0.5}}",
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(rank_pools: Any, tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("teacher") / "run"
    rank_pools(1).run(tiny.run, tiny_recipe, run, **TEACHER)
    return run


def losses(run: Path, name: str) -> list[float]:
    return [line[f"distill/{name}"] for line in read_metrics(run) if f"distill/{name}" in line]


@pytest.mark.ranks
def test_each_stage_lowers_its_loss_at_every_zero_stage(rank_pools, tiny_recipe, teacher, tmp_path: Path):
    first: list[float] = []
    before = load_weights(teacher / "checkpoints/step_00000030")
    for number, (processes, stage, more) in enumerate(
        [
            (2, 0, {}),
            (2, 1, {"parallel__sequence": 2}),
            (2, 2, {"train__loss_chunk": 7}),
            (2, 3, {}),
        ]
    ):
        run = tmp_path / str(number)
        settings = {"train__teacher": teacher, "train__checkpoint_every": 5}
        rank_pools(processes).run(
            tiny.run, tiny_recipe, run, **STUDENT, **settings, **more, parallel__zero_stage=stage
        )
        hidden, kl, ce = (losses(run, name) for name in ("hidden", "kl", "ce"))
        assert (len(hidden), len(kl), len(ce)) == (5, 7, 7)
        assert hidden[-1] < 0.8 * hidden[0]
        assert kl[-1] < 0.8 * kl[0]
        first = first or [*hidden, *kl, *ce]
        assert [*hidden, *kl, *ce] == pytest.approx(first, rel=1e-3)
        total = [line["train/loss"] for line in read_metrics(run) if "distill/kl" in line]
        assert total[-1] == pytest.approx(ce[-1] + 0.5 * kl[-1], rel=1e-5)
        tags = [load_weights(run / "checkpoints" / f"step_{step:08}") for step in (5, 10)]
        same = {name for name in tags[0] if tags[0][name].equal(tags[1][name])}
        assert {"blocks.0.mixer.c_q.weight", "norm.weight"} <= same  # frozen
        assert not {"blocks.1.mixer.c_q.weight", "embedding.weight", "head.weight"} & same
        torch.manual_seed(0)
        started = HybridLM.from_recipe(recipes.load(run / "recipe.yaml"))
        for name in ("embedding.weight", "head.weight"):  # aligning blocks neither trains nor decays them
            assert tags[0][name].equal(dict(started.named_parameters())[name])
    after = load_weights(teacher / "checkpoints/step_00000030")
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit_within_its_stages(rank_pools, tiny_recipe, teacher, tmp_path, stage: int):
    settings = STUDENT | {
        "train__teacher": teacher,
        "train__checkpoint_every": 3,
        "train__keep_last": 9,
        "parallel__zero_stage": stage,
    }
    rank_pools(2).run(tiny.run, tiny_recipe, tmp_path / "run", **settings)
    names = ("train/loss", "train/gradient_norm_before_clipping", "data/checksum")
    straight = tiny.series(tmp_path / "run", *names)
    for gone in ("step_00000006", "step_00000009", "step_00000012"):
        shutil.rmtree(tmp_path / "run/checkpoints" / gone)
    rank_pools(2).run(tiny.run, tiny_recipe, tmp_path / "run", **settings)
    lines = (tmp_path / "run/metrics.jsonl").read_text().count('"train/loss"')
    assert lines == 12 + 9
    assert tiny.series(tmp_path / "run", *names) == straight
    settings["train__distill"] = "{align: {steps: 5, hidden: 1, context: 8}, logits: {kl: 1}}"
    (kind, words), _ = rank_pools(2).run(tiny.run, tiny_recipe, tmp_path / "run", **settings)
    assert kind == "TrainError"
    assert "train.distill" in words


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__hidden_size": 32}, "hidden_size is 16 there and 32 here, which stage 'align' aligns"),
        ({"model__pattern": "FKK"}, "layers is 2 there and 3 here, which stage 'align' aligns"),
        ({"model__vocab_size": 384}, "model.vocab_size is 320 there and 384 here"),
        ({"train__only": "[head.*]"}, "train.only trains no block, which stage 'align' aligns"),
        ({"train__teacher": "nowhere"}, "nowhere holds no whole weights"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(rank_pools, tiny_recipe, teacher, tmp_path, changes, words):
    settings = STUDENT | {"train__teacher": teacher} | changes
    ((kind, told),) = rank_pools(1).run(tiny.run, tiny_recipe, tmp_path / "run", **settings)
    assert kind == "TrainError"
    assert words in told


def test_a_teacher_keeps_its_dtype_and_its_tokenizer_counts(tiny_recipe, teacher, tmp_path: Path):
    model, tokenizer, used = load_run(teacher)
    folder = tmp_path / "bf16"
    folder.mkdir()
    save_file({name: x.bfloat16() for name, x in model.state_dict().items()}, folder / "model.safetensors")
    record = {"format": "hybrid", "settings": asdict(used.model), "tokenizer": tokenizer.fingerprint}
    (folder / "conversion.json").write_text(json.dumps(record))
    recipe = recipes.load(
        tiny_recipe, [f"train.teacher={folder}", "train.distill={a: {kl: 1, steps: 2}, b: {ce: 1}}"]
    )
    said: list[str] = []
    student = small("FW", 0)
    student.vocab_size = 320
    found = Objectives(recipe, student, tokenizer.fingerprint, torch.device("cpu"), 0, said.append)
    first = found.at(0).teacher
    assert first is not None
    assert {p.dtype for p in first.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in first.parameters())
    assert found.at(2).teacher is None
    assert ["teacher from" in said[0], *said[1:]] == [
        True,
        "stage a, to step 2: 1 kl",
        "stage b, to step 4: 1 ce",
    ]
    with pytest.raises(ValueError, match=r"train\.teacher: the weights in .* with another tokenizer"):
        Objectives(recipe, student, "0" * 64, torch.device("cpu"), 0, said.append)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.distill={a: {kl: 1}}"], "train.teacher.*: needs a value: stage 'a' of train.distill"),
        (["train.teacher=x"], "train.teacher.*: is given, but no stage"),
        (["train.teacher=x", "train.distill={a: {}}"], "distill.a.*: needs a weight above 0"),
        (["train.teacher=x", "train.distill={a: {hidden: 1, ce: 1}}"], "hidden is alone in its stage"),
        (
            ["train.teacher=x", "train.distill={a: {kl: 1, steps: 1}, b: {hidden: 1}}"],
            "distill.b.*: stages of hidden come before",
        ),
        (["train.teacher=x", "train.distill={a: {kl: 1}, b: {ce: 1}}"], "distill.a.steps.*: needs a value"),
        (["train.teacher=x", "train.distill={a: {kl: 1, steps: 3}}"], "are 3 = 3, .* train.steps 4"),
        (
            ["train.teacher=x", "train.distill={a: {kl: 1, context: 5}}"],
            "is 5: no divisor of data.context 16",
        ),
        (["train.teacher=x", "train.distill={a: {kl: 1, stops: 5}}"], "unknown key; did you mean .*steps"),
        (
            ["train.teacher=x", "train.distill={a: {kl: 1}}", "model.pattern=W", "train.tbptt_chunks=2"],
            "a teacher reads no chunks",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(tiny_recipe: Path, overrides: list[str], words: str):
    with pytest.raises(RecipeError, match=words):
        recipes.load(tiny_recipe, overrides)


def test_cross_entropy_alone_needs_no_teacher(tiny_recipe: Path):
    found = recipes.load(tiny_recipe, ["train.distill={short: {ce: 1, steps: 2, context: 8}, long: {ce: 1}}"])
    objectives = Objectives(found, small("F", 0), "", torch.device("cpu"), 0, lambda _: None)
    assert [objectives.at(step).stage.context for step in range(4)] == [8, 8, None, None]
    values = {"ce": torch.tensor(2.0), "kl": torch.tensor(3.0)}
    assert Objective(StageSection(ce=1.0, kl=0.5)).total(values).item() == 3.5


def test_a_checkpoint_of_an_earlier_version_knows_no_stages(tiny_recipe: Path):
    found = recipes.load(tiny_recipe)
    stored = resume.plain(found)
    for name in ("distill", "teacher", "only"):
        del stored["train"][name]
    origin = Origin(world_size=1, zero_stage=1, precision="fp32", recipe=stored, tokenizer="t")
    now = replace(origin, recipe=resume.plain(found))
    assert resume.check(origin, now) == [resume.NO_FINGERPRINT]
    now.recipe["train"] |= {"distill": {"text": {"ce": 1.0}}, "only": ["head.*"]}
    with pytest.raises(TrainError, match=r"train\.distill: None -> .*train\.only: None -> \['head\.\*'\]"):
        resume.check(origin, now)
