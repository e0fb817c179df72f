"""Checkpoint folders that the real engine of DeepSpeed writes, to model folders."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid import recipe as recipes
from hybrid.cli.main import main
from hybrid.convert.common import complete, same_bits
from hybrid.recipe.schema import ModelSection
from tests.hybrid.mini import build, ids

ODD = {
    "pattern": "KW",
    "hidden_size": 36,
    "vocab_size": 317,
    "ffn_size": 37,
    "defaults": {"num_heads": 3, "num_kv_heads": 1, "window": 32, "chunk": 16, "rotary_dim": 6},
}
"""Sizes that two and three processes do not divide."""


def odd(tied=False) -> ModelSection:
    return complete(ModelSection(**ODD, tie_embeddings=tied))


def write_checkpoint(folder: str, stage: int, precision: str, tied: bool, frozen: bool, upstream=False):
    """Train three steps and save, on every rank; returns all weights in fp32 (frozen ones as they are)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(1)
    model = build(odd(tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
            parameter.requires_grad_(not frozen or not name.startswith(("embedding.", "blocks.0.mixer.")))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        for step in range(3):
            row = ids(24, seed=3 * engine.global_rank + step, vocab=317)
            loss = engine(row, labels=row)
            engine.backward(loss.total / loss.tokens)
            engine.step()
        engine.save_checkpoint(folder)
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (stage or precision == "bf16"):
            weights[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
    engine.destroy()
    return weights


CASES = {
    "alone": (1, 0, "fp32", False, False),
    "data parallel, tied, frozen": (2, 0, "fp32", True, True),
    "stage 1, bf16, tied": (2, 1, "bf16", True, False),
    "stage 1, frozen": (2, 1, "fp32", False, True),
    "stage 2, bf16, frozen": (2, 2, "bf16", False, True),
    "stage 2, three processes": (3, 2, "fp32", True, False),
    "stage 3, bf16": (2, 3, "bf16", False, False),
    "stage 3, three processes, tied, frozen": (3, 3, "fp32", True, True),
}


def as_recipe(folder: Path, tied=False) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipes.to_yaml({"model": odd(tied)}))
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_the_real_engine_becomes_the_model_that_was_trained(rank_pools, case, tmp_path, capsys):
    size, stage, precision, tied, frozen = CASES[case]
    source = tmp_path / "source"
    weights, *_ = rank_pools(size).run(write_checkpoint, str(source), stage, precision, tied, frozen)
    recipe = as_recipe(tmp_path, tied)
    checks = [] if case.startswith("stage 3, three") else ["--no-check"]
    assert main(["convert", str(source), str(tmp_path / "made"), "--recipe", str(recipe), *checks]) == 0
    said = capsys.readouterr().out
    assert "weights of global_step3" in said
    made = load_file(tmp_path / "made/model.safetensors")
    assert made.keys() == weights.keys()
    for name, tensor in weights.items():
        assert same_bits(made[name], tensor), name
    assert all(t.any() for name, t in made.items() if weights[name].any())
    report = json.loads((tmp_path / "made/conversion.json").read_text())
    assert ("head.weight" in report["dropped"]) == (tied and stage > 0)
    assert ("frozen in training: blocks.0.mixer" in said) == (frozen and stage > 0)
