"""Checkpoint folders that the real engine of DeepSpeed writes, to model folders."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid import recipe as recipes
from hybrid.cli.main import main
from hybrid.convert.common import Options, complete, same_bits
from hybrid.convert.deepspeed import FORMAT
from hybrid.convert.kvm_paper import to_upstream, upstream_name
from hybrid.convert.paper_folder import upstream_config
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


def odd(tied=False, **changes) -> ModelSection:
    return complete(ModelSection(**{**ODD, **changes}, tie_embeddings=tied))


def write_checkpoint(
    folder: str, stage: int, precision: str, tied: bool, frozen: bool, config=(), section=()
):
    """Train three steps and save, on every rank; returns all weights in fp32 (frozen ones as they are)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    torch.manual_seed(1)
    model = build(odd(tied, **dict(section)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
            parameter.requires_grad_(not frozen or not name.startswith(("embedding.", "blocks.0.mixer.")))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 10**9,
        **dict(config),
    }
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        for step in range(3):
            row = ids(24, seed=3 * engine.global_rank + step, vocab=317)
            loss = engine(row, labels=row)
            engine.backward(loss.total / loss.tokens)
            engine.step()
        engine.save_checkpoint(folder)
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and stage:
            weights[name] = safe_get_full_fp32_param(parameter).clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
    engine.destroy()
    return weights


FP32_ACCUMULATION = {
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "data_types": {"grad_accum_dtype": "fp32"},
}
CASES = {
    "alone": (1, 0, "fp32", False, False),
    "stage 1, bf16, gradients in fp32": (2, 1, "bf16", False, True, FP32_ACCUMULATION),
    "without ZeRO, bf16": (2, 0, "bf16", True, False),
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
    size, stage, precision, tied, frozen, *more = CASES[case]
    source = tmp_path / "source"
    weights, *_ = rank_pools(size).run(write_checkpoint, str(source), stage, precision, tied, frozen, *more)
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
    assert ("fp32 masters that have no names" in said) == (case == "without ZeRO, bf16")
    assert ("frozen in training: blocks.0.mixer" in said) == (frozen and stage > 0)


@pytest.fixture(scope="module")
def checkpoint(rank_pools, tmp_path_factory):
    """A checkpoint of two processes at stage 2, with its recipe beside the tag."""
    folder = tmp_path_factory.mktemp("deepspeed") / "run"
    weights, _ = rank_pools(2).run(write_checkpoint, str(folder), 2, "bf16", True, False)
    as_recipe(folder, tied=True)
    return folder, weights


@pytest.fixture
def copied(checkpoint, tmp_path):
    """The same, to be damaged; and its tag."""
    shutil.copytree(checkpoint[0], tmp_path / "copied")
    return tmp_path / "copied", tmp_path / "copied" / "global_step3"


def refused(capsys, source, tmp_path) -> str:
    assert main(["convert", str(source), str(tmp_path / "made"), "--no-check"]) == 2
    assert not (tmp_path / "made").exists()
    return capsys.readouterr().err


def test_a_tied_head_is_tied_again_where_the_result_is_loaded(checkpoint, tmp_path, capsys):
    """deepspeedai/DeepSpeed#1896: a conversion that left out the head tied to the embedding."""
    folder, weights = checkpoint
    assert main(["convert", str(folder / "global_step3"), str(tmp_path / "made")]) == 0
    assert "largest difference of the logits of 768 tokens 0" in capsys.readouterr().out
    live = build(odd(tied=True))
    live.load_state_dict(weights)
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from hybrid.convert.model_folder import FORMAT; from hybrid.convert.check import logits\n"
        "from hybrid.convert.common import Options\n"
        "ids = torch.arange(200)[None]\n"
        "torch.save(logits(FORMAT.read(Path(sys.argv[1]), Options()), ids), sys.argv[2])"
    )
    out = tmp_path / "logits.pt"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "made"), str(out)], check=True, timeout=120)
    with torch.no_grad():
        assert torch.equal(torch.load(out, weights_only=True), live(torch.arange(200)[None])[0])


def test_a_share_that_is_missing_or_cut_short_is_named(copied, tmp_path, capsys):
    source, tag = copied
    second = next(tag.glob("*zero_pp_rank_1_*optim_states.pt"))
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    assert f"{second.name} is truncated, damaged" in refused(capsys, source, tmp_path)
    second.unlink()
    assert "optim_states.pt of 1 processes, written by 2" in refused(capsys, source, tmp_path)
    first = next(tag.glob("*zero_pp_rank_0_*optim_states.pt"))
    first.rename(second)
    assert "optim_states file of rank 0 is missing" in refused(capsys, source, tmp_path)
    second.unlink()
    assert "optim_states.pt of 0 processes" in refused(capsys, source, tmp_path)
    (tag / "mp_rank_01_model_states.pt").write_bytes(content)
    assert "tensor parallelism are not supported" in refused(capsys, source, tmp_path)
    (tag / "layer_00-model_00-model_states.pt").write_bytes(b"")
    assert "pipeline stages are not supported" in refused(capsys, source, tmp_path)


def test_masters_that_are_not_the_weights_are_refused_by_name(copied, tmp_path, capsys):
    """deepspeedai/DeepSpeed#6791: zeros where weights should be."""
    source, tag = copied
    path = next(tag.glob("*zero_pp_rank_1_*optim_states.pt"))
    share = torch.load(path, weights_only=False)
    share["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.zero_()
    torch.save(share, path)
    words = refused(capsys, source, tmp_path)
    assert "the fp32 master of " in words
    assert "is not the weight that the module has" in words


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_code_in_a_client_state_is_not_run(copied, tmp_path, monkeypatch, capsys):
    source, tag = copied
    monkeypatch.chdir(tmp_path)
    path = tag / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    torch.save(states | {"mine": Evil()}, path)
    words = refused(capsys, source, tmp_path)
    assert "mp_rank_00_model_states.pt holds posix.system" in words
    assert not (tmp_path / "ran").exists()


def test_without_a_recipe_it_is_asked_for(copied, tmp_path, capsys):
    source, _ = copied
    (source / "recipe.yaml").unlink()
    assert "give --recipe" in refused(capsys, source, tmp_path)


def test_masters_whose_place_deepspeed_records_wrongly_are_refused(rank_pools, tmp_path, capsys):
    """Its option round_robin_gradients reorders parameters, and its record of their places stays behind."""
    options = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    rank_pools(2).run(write_checkpoint, str(tmp_path / "run"), 2, "fp32", False, False, options)
    as_recipe(tmp_path / "run")
    assert "is not the weight that the module has" in refused(capsys, tmp_path / "run", tmp_path)


def test_names_of_the_papers_code_are_understood(rank_pools, checkpoint, tmp_path):
    """A run of the paper's code that DeepSpeed saved: its names, its config.json beside the tag."""
    section = {"ffn_size": 32}
    weights, _ = rank_pools(2).run(
        write_checkpoint, str(tmp_path / "run"), 1, "fp32", False, False, section=section
    )
    tag = tmp_path / "run/global_step3"
    for path in tag.glob("*_states.pt"):
        states = torch.load(path, weights_only=False)
        if "module" in states:
            states["module"] = to_upstream(states["module"])
            states["param_shapes"] = [
                {upstream_name(name): states["module"][upstream_name(name)].shape for name in group}
                for group in states["param_shapes"]
            ]
        else:
            groups = states["optimizer_state_dict"]["param_slice_mappings"]
            groups[:] = [{upstream_name(name): where for name, where in group.items()} for group in groups]
        torch.save(states, path)
    (tmp_path / "run/config.json").write_text(json.dumps(upstream_config(odd(**section))))
    model = FORMAT.read(tmp_path / "run", Options())
    assert model.section.pattern == "KW"
    assert all(same_bits(model.tensors[name].read(), tensor) for name, tensor in weights.items())
