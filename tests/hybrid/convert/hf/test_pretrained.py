"""Tiny random transformers of the Llama family become models of ours with the same logits."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from hybrid.cli.main import main
from hybrid.convert.check import logits
from hybrid.convert.common import Options, same_bits
from hybrid.convert.hf.folder import FORMAT
from hybrid.convert.hf.pretrained import our_name
from hybrid.recipe.pattern import expand

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 5000.0,
}  # fmt: skip
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
MODELS = {
    "grouped heads": (LlamaConfig(**SIZES), "F4"),
    "one key head": (LlamaConfig(**(SIZES | {"num_key_value_heads": 1}), tie_word_embeddings=True), "F4"),
    "head size": (LlamaConfig(**SIZES, head_dim=20, rms_norm_eps=1e-3), "F4"),
    "linear scaling": (LlamaConfig(**SIZES, rope_parameters=LINEAR), "F4"),
    "llama3 scaling": (LlamaConfig(**SIZES, rope_parameters=LLAMA3), "F4"),
    "yarn scaling": (LlamaConfig(**SIZES, rope_parameters=YARN), "F4"),
    "sliding window": (MistralConfig(**SIZES, sliding_window=24), "W4"),
    "no window": (MistralConfig(**SIZES, sliding_window=None), "F4"),
    "qkv bias": (Qwen2Config(**SIZES, tie_word_embeddings=True), "F4"),
    "some windows": (Qwen2Config(**SIZES, **SOME_WINDOWS), "F2W2"),
    "q/k norms": (Qwen3Config(**SIZES, head_dim=16), "F4"),
    "unrotated layers": (SmolLM3Config(**SIZES, pad_token_id=None), "F3N"),
}  # fmt: skip


def convert(*arguments) -> int:
    return main(["convert", *map(str, arguments)])


def source(config, folder, dtype=torch.float32):
    """A random model whose biases and norms are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", MODELS)
@torch.no_grad()
def test_every_kind_of_source_keeps_its_logits(case, tmp_path):
    config, pattern = MODELS[case]
    theirs = source(config, tmp_path / "theirs")
    model = FORMAT.read(tmp_path / "theirs", Options())
    ids = torch.randint(131, (1, 150), generator=torch.Generator().manual_seed(1))
    wanted = theirs(ids).logits
    assert (logits(model, ids) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert model.section.expanded == expand(pattern)
    weights = load_file(tmp_path / "theirs/model.safetensors")
    assert len(weights) == len(model.tensors)
    assert all(same_bits(tensor, model.tensors[our_name(name)].read()) for name, tensor in weights.items())


def test_the_command_checks_and_reports_and_other_patterns_keep_what_has_a_place(tmp_path, capsys):
    source(MODELS["qkv bias"][0], tmp_path / "theirs", torch.bfloat16)
    assert convert(tmp_path / "theirs", tmp_path / "ours", "model.pattern=F4") == 0, capsys.readouterr().err
    report = json.loads((tmp_path / "ours/conversion.json").read_text())
    assert report["check"]["largest_difference"] < 1e-3
    assert report["check"]["same_model"]
    assert not report["created"] | report["dropped"]
    assert len(report["copied"]) == 2 + 4 * 12
    changes = ("model.pattern=FWRF", "model.layers.W.window=16")
    assert convert(tmp_path / "theirs", tmp_path / "hybrid", *changes, "--to", "hf") == 0
    report = json.loads((tmp_path / "hybrid/conversion.json").read_text())
    assert all(name.startswith("blocks.2.mixer") for name in report["created"])
    assert set(report["dropped"]) == {
        f"model.layers.2.self_attn.{name}"
        for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight",
                     "v_proj.bias", "o_proj.weight")
    }  # fmt: skip
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), "dynamic"),
        (LlamaConfig(**SIZES, attention_bias=True), "attention_bias"),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "hidden_act 'gelu'"),
    ],
)  # fmt: skip
def test_what_we_do_not_have_is_refused_by_name(config, words, tmp_path, capsys):
    source(config, tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours") == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_other_models_and_other_tensors_are_refused_by_name(tmp_path, capsys):
    source(MODELS["grouped heads"][0], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights | {"model.layers.1.adapter.weight": kept}, tmp_path / "model.safetensors")
    assert convert(tmp_path, tmp_path / "ours") == 2
    said = capsys.readouterr().err
    assert "missing tensor 'blocks.1.ffn.c_fc.weight'" in said
    assert "unknown tensor 'model.layers.1.adapter.weight'" in said
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert convert(tmp_path, tmp_path / "ours") == 2
    assert "model_type 'gpt2'; read are llama" in capsys.readouterr().err
