"""`train.only`: what it names is trained as if alone, the rest keeps its bits, at every ZeRO stage."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import recipe as recipes
from hybrid.checkpoint import tensor_files
from hybrid.checkpoint.run import load_weights
from hybrid.cli.main import main
from hybrid.distributed import world as distributed
from hybrid.estimate.info import meta_model
from hybrid.estimate.memory import memory_estimate
from hybrid.model import HybridLM
from hybrid.model.freeze import freeze_all_but
from hybrid.recipe import Geometry, RecipeError, layer_specs
from hybrid.recipe.schema import Recipe
from hybrid.train.engine import Engine

from . import tiny

STEPS, CLIP = 3, 0.3
ONLY = ["W.mixer.*", "norm.bias", "head.weight"]
"""Leaves a group (embedding) empty; `W` has LayerNorms of 7 elements."""
NOISY = "blocks.1.mixer.ln_k.bias"
"""Its last element has no gradient but noise, as it is not rotated, and AdamW makes full steps of that."""

CASES = {
    1: [(0, "fp32"), (1, "fp32"), (3, "fp32"), (2, "bf16")],
    2: [*((stage, "fp32") for stage in range(4)), *((stage, "bf16") for stage in (1, 2, 3))],
}
"""Processes -> ZeRO stages and precisions."""


def recipe(
    stage: int = 0, precision: str = "fp32", only: list[str] | None = None, tied: bool = False
) -> Recipe:
    found = Recipe()
    found.model.pattern, found.model.hidden_size, found.model.vocab_size = "FWF", 14, 317
    found.model.defaults = {"num_heads": 2, "rotary_dim": 6, "rotary_style": "standard"}
    found.model.layers = {"W": {"window": 4}}
    found.model.ffn_size, found.model.tie_embeddings = 37, tied
    found.optimizer.lr, found.optimizer.clip = 1e-2, CLIP
    found.parallel.zero_stage, found.train.precision, found.train.only = stage, precision, only
    return found


def model(settings: Recipe) -> HybridLM:
    torch.manual_seed(0)
    made = HybridLM(settings.model, layer_specs(settings.model))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
            parameter.copy_(parameter.bfloat16())
    freeze_all_but(made, settings.train.only)
    return made


def ids(step: int) -> torch.Tensor:
    return torch.randint(0, 317, (2, 12), generator=torch.Generator().manual_seed(step))


def loss(out: Any) -> torch.Tensor:
    return out.total / out.tokens


def in_rank(
    stage: int, precision: str, only: list[str], folder: Path
) -> tuple[dict[str, torch.Tensor], list[float], set[str]]:
    """Train some steps and write a checkpoint; returns weights, norms, and the names with state."""
    settings, world = recipe(stage, precision, only), distributed.start(1)
    engine = Engine(model(settings), settings, Geometry(world.size, world.size, 1, 1), world)
    norms = []
    for step in range(STEPS):
        engine.set_rates(1.0)
        engine.backward(loss(engine.forward(ids(step), labels=ids(step))))
        norms.append(engine.step().norm)
    write(engine, folder)
    files = engine.zero_state.files()
    with_state = {entry.parameter for file in files for entry in file.entries if entry.key}
    engine.close()
    return load_weights(folder) if world.main else {}, norms, with_state


def write(engine: Engine, folder: Path) -> None:
    for file, chunks in engine.zero_state.capture():
        tensor_files.write(folder / file.name, file.header(), chunks, lambda: None)


def written_again(stage: int, precision: str, source: Path, target: Path) -> None:
    settings, world = recipe(stage, precision, ONLY), distributed.start(1)
    engine = Engine(model(settings), settings, Geometry(world.size, world.size, 1, 1), world)
    engine.load(source)
    write(engine, target)
    engine.close()


def alone() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps with torch alone."""
    plain = model(recipe(only=ONLY))
    named = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if name not in plain.no_decay()]
    others = [p for name, p in named if name in plain.no_decay()]
    section = recipe().optimizer
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=section.lr, betas=(section.betas[0], section.betas[1]), eps=section.eps,
    )  # fmt: skip
    norms = []
    for step in range(STEPS):
        adamw.zero_grad()
        loss(plain(ids(step), labels=ids(step))).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_([p for _, p in named], CLIP)))
        adamw.step()
    return {name: p.detach() for name, p in plain.named_parameters()}, norms


def trained(names: Collection[str]) -> set[str]:
    return {name for name in names if name.startswith("blocks.1.mixer.")} | {"norm.bias", "head.weight"}


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [1, 2])
def test_every_stage_trains_the_named_parts_as_torch_does(rank_pools, tmp_path: Path, processes: int):
    right, right_norms = alone()
    before = {name: p.detach() for name, p in model(recipe()).named_parameters()}
    cases = CASES[processes]
    written = {}
    for stage, precision in cases:
        folder = tmp_path / f"{stage}_{precision}"
        folder.mkdir()
        (weights, norms, with_state), *_ = rank_pools(processes).run(in_rank, stage, precision, ONLY, folder)
        assert with_state == trained(right)
        assert weights.keys() == right.keys()
        for name in right.keys() - trained(right):
            assert weights[name].equal(before[name]), (stage, precision, name)
        if precision == "fp32":
            assert norms == pytest.approx(right_norms, rel=1e-4)
            for name in trained(right) - {NOISY}:
                torch.testing.assert_close(weights[name], right[name], atol=2e-5, rtol=0)
        else:
            assert all(not weights[name].equal(before[name]) for name in trained(right))
        written[precision] = folder
    for number, (stage, precision) in enumerate(cases):  # a checkpoint depends on neither stage nor processes
        target, source = tmp_path / f"again_{number}", written[precision]
        target.mkdir()
        rank_pools(3 - processes).run(written_again, stage, precision, source, target)
        for path in target.iterdir():
            assert path.read_bytes() == (source / path.name).read_bytes(), (stage, precision)


@pytest.mark.ranks
def test_a_run_goes_on_elsewhere_but_not_with_other_parts(rank_pools, tiny_recipe: Path, tmp_path: Path):
    settings = {"train__only": "[W.*, norm.*]", "train__checkpoint_every": 2, "model__vocab_size": 317}
    rank_pools(2).run(tiny.run, tiny_recipe, tmp_path / "run", **settings, parallel__zero_stage=3)
    straight = tiny.series(tmp_path / "run")
    weights = [load_weights(tmp_path / "run/checkpoints" / f"step_0000000{n}") for n in (2, 4)]
    same = {name for name in weights[0] if weights[0][name].equal(weights[1][name])}
    assert {name.partition(".mixer")[0] for name in same} >= {"embedding.weight", "blocks.0", "head.weight"}
    assert not same & {"blocks.1.mixer.c_q.weight", "blocks.1.ffn.c_fc.weight", "norm.weight", "norm.bias"}
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    for processes, stage in ((1, 0), (1, 2), (2, 1)):
        output = tmp_path / f"{processes}x{stage}"
        shutil.copytree(tmp_path / "run/checkpoints", output / "checkpoints")
        rank_pools(processes).run(tiny.run, tiny_recipe, output, **settings, parallel__zero_stage=stage)
        for found, wanted in zip(tiny.series(output), straight[2:], strict=True):
            assert found == pytest.approx(wanted, rel=1e-3)
    settings["train__only"] = "[W.*]"
    (kind, words), _ = rank_pools(2).run(tiny.run, tiny_recipe, tmp_path / "run", **settings)
    assert kind == "TrainError"
    assert "train.only: ['W.*', 'norm.*'] -> ['W.*']" in words
    assert "train.init_from" in words


# Names


@pytest.mark.parametrize(
    ("only", "words"),
    [
        (["blocks.1.mixr.c_q.weight"], "matches no parameter; did you mean blocks.1.mixer.c_q.weight?"),
        (["K.*", "norm.*"], r"'K\.\*' matches no parameter; did you mean [FW]\.\*\?"),
        ([], r"\[\] trains nothing; null trains all"),
    ],
)
def test_names_that_train_nothing_are_refused_with_the_nearest(only: list[str], words: str):
    with pytest.raises(RecipeError, match=f"train.only: .*{words}"):
        model(recipe(only=only))


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_head_is_one_parameter_under_both_names(name: str):
    made = model(recipe(only=[name], tied=True))
    assert [name for name, p in made.named_parameters() if p.requires_grad] == ["embedding.weight"]
    assert made.head.weight is made.embedding.weight
    assert made.num_trained == 317 * 14


def test_a_letter_stands_for_every_layer_of_it():
    made = model(recipe(only=["F.ffn.c_*"]))
    found = {name for name, p in made.named_parameters() if p.requires_grad}
    assert found == {f"blocks.{n}.ffn.{matrix}.weight" for n in (0, 2) for matrix in ("c_fc", "c_proj")}


def test_estimates_count_optimizer_and_gradients_of_what_is_trained(tiny_recipe: Path, capsys):
    found = recipes.load(tiny_recipe, ["train.only=[head.*]", "model.vocab_size=317"])
    made = meta_model(found)
    assert made.num_trained == 317 * 16
    needed = memory_estimate(made, found, Geometry(1, 1, 1, 1), 1)
    assert needed[:3] == (4 * made.num_parameters, 4 * 317 * 16, 12 * 317 * 16)
    assert main(["info", str(tiny_recipe), "train.only=[head.*]", "model.vocab_size=317"]) == 0
    assert "trained (train.only)  5,072" in " ".join(capsys.readouterr().out.split("  "))
    assert main(["info", str(tiny_recipe), "train.only=[heat.*]"]) == 2
    assert "did you mean" in capsys.readouterr().err
