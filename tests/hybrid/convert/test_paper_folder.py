"""The paper's code to our model folders and back, through the command."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.checkpoint.tensor_files import Reader
from hybrid.cli.main import main
from hybrid.convert.check import logits
from hybrid.convert.common import Options, complete, same_bits
from hybrid.convert.model_folder import FORMAT
from hybrid.convert.paper_folder import upstream_config
from hybrid.errors import NotSupported
from hybrid.recipe.letters import layer_specs
from hybrid.verify.vectors import below, read_cases
from tests.hybrid.mini import section

VECTORS = Path(__file__).parents[2] / "vectors"
ALL_VECTORS = Path(__file__).parents[4] / "shared" / "conformance"
"""More of the same, where they are at hand."""
MODELS = [
    case
    for folder in (VECTORS, ALL_VECTORS)
    if folder.is_dir()
    for case in read_cases(folder)
    if (case.level or case.kind) == "model"
]


def convert(*arguments) -> int:
    return main(["convert", *map(str, arguments)])


def written(case, folder: Path, suffix=".safetensors", **changes) -> Path:
    """A stored model as a folder of the paper's code."""
    folder.mkdir()
    tensors = below("state_dict/" if case.level else "param.", case.tensors())
    path = folder / f"model{suffix}"
    if suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)
    (folder / "config.json").write_text(json.dumps(case.config | changes))
    return folder


@pytest.mark.parametrize("case", MODELS, ids=lambda case: f"{case.folder.name}-{case.name}")
def test_every_stored_model_goes_through_the_command_and_back(case, tmp_path, capsys):
    theirs = written(case, tmp_path / "theirs")
    unchecked = [] if case.name == "model_kvm_swa.safetensors" else ["--no-check"]
    assert convert(theirs, tmp_path / "ours", *unchecked) == 0, capsys.readouterr().err
    tensors = case.tensors()
    model = FORMAT.read(tmp_path / "ours", Options())
    with torch.no_grad():
        found = logits(model, tensors["input_ids"].long())
    assert (found - tensors["logits"]).abs().max() < 1e-5
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "paper", *unchecked) == 0
    before, after = load_file(theirs / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert convert(tmp_path / "back", tmp_path / "again", *unchecked) == 0
    again = FORMAT.read(tmp_path / "again", Options())
    assert layer_specs(again.section) == layer_specs(model.section)
    for name, tensor in model.tensors.items():
        assert same_bits(tensor.read(), again.tensors[name].read()), name
    assert Reader(tmp_path / "again").weights


@pytest.fixture
def theirs(tmp_path):
    """A folder of the paper's code with sliding windows and KVM."""
    return written(MODELS[0], tmp_path / "theirs")


def settings(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def test_the_append_gate_is_asked_for_where_the_config_does_not_say(theirs, tmp_path, capsys):
    """Its default was 1 in the first release of the paper's code, and is 0 in the later one."""
    settings(theirs, kvm_apply_merge_gate_to_appends=...)
    assert convert(theirs, tmp_path / "made", "--no-check") == 2
    assert "'kvm_apply_merge_gate_to_appends' (1 in the paper's first release" in capsys.readouterr().err
    for value in (0, 1):
        made = tmp_path / f"made{value}"
        assert convert(theirs, made, f"kvm_apply_merge_gate_to_appends={value}", "--no-check") == 0
        section = FORMAT.read(made, Options()).section
        assert section.layers["K"]["gate_appends"] is bool(value)
        assert upstream_config(section)["kvm_apply_merge_gate_to_appends"] == value


def test_a_bare_state_dict_with_its_settings_on_the_command_line(theirs, tmp_path, capsys):
    tensors = load_file(theirs / "model.safetensors")
    wrapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    (tmp_path / "alone").mkdir()
    path = tmp_path / "alone/rwkv-10.pth"
    torch.save({"state_dict": wrapped}, path)
    assert convert(path, tmp_path / "made", "--no-check") == 2
    assert "no config.json beside it" in capsys.readouterr().err
    config = json.loads((theirs / "config.json").read_text())
    keys = [f"{key}={json.dumps(value)}" for key, value in config.items()]
    assert convert(path, tmp_path / "made", "--no-check", *keys) == 0
    assert convert(theirs, tmp_path / "same", "--no-check") == 0
    made, same = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "same"))
    assert all(same_bits(made[name], tensor) for name, tensor in same.items())


def test_a_config_without_the_usual_tie_key_keeps_the_head(theirs, tmp_path, capsys):
    """The paper's code misspells it and has a head of its own."""
    settings(theirs, tie_word_embeddings=..., tie_embedding_word=True)
    assert convert(theirs, tmp_path / "ours", "--no-check", "kvm_use_head_temp=0") == 0
    assert "keys of the config that nothing here reads: " in (said := capsys.readouterr().out)
    assert {"kvm_use_head_temp", "tie_embedding_word"} <= set(said.replace(",", "").split())
    model = FORMAT.read(tmp_path / "ours", Options())
    assert not model.section.tie_embeddings
    assert not same_bits(model.tensors["head.weight"].read(), model.tensors["embedding.weight"].read())
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "paper", "--no-check") == 0
    assert json.loads((tmp_path / "back/config.json").read_text())["tie_word_embeddings"] is False


def test_missing_extra_and_misshapen_tensors_are_refused_by_their_names(theirs, tmp_path, capsys):
    tensors = load_file(theirs / "model.safetensors")
    tensors["transformer.h.9.attn.c_q.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, theirs / "model.safetensors")
    assert convert(theirs, tmp_path / "made") == 2
    words = capsys.readouterr().err
    assert "unknown tensor 'transformer.h.9.attn.c_q.weight'" in words
    assert "missing tensor 'lm_head.weight'" in words


@pytest.mark.parametrize(
    ("pattern", "period"),
    [
        ("K4", -1),
        ("WK", 2),
        ("(WK)3", 2),
        ("(WK3)2", 4),
        ("WK2WK", 3),
        ("WK2W", 3),
        ("RF", 2),
        ("BQ2", 3),
        ("F", -1),
        ("R3", -1),
    ],
)
def test_patterns_become_periods_and_come_back(pattern, period):
    head = {"num_heads": 4, "head_dim": 16, "chunk": 16, "rotary_dim": 8}
    ours = complete(section(pattern, defaults=head))
    config = upstream_config(ours)
    assert config["alt_layer_every"] == period
    assert "num_key_value_heads" not in config


@pytest.mark.parametrize("pattern", ["WWK", "WKKWKW", "KFRK", "FWFWWF"])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(NotSupported, match=r"kinds of layers|layers 0, n, 2n"):
        upstream_config(complete(section(pattern)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "rmsnorm"}, "model.norm 'rmsnorm', there 'layernorm'"),
        ({"feed_forward": "swiglu"}, "model.feed_forward 'swiglu'"),
        ({"tie_embeddings": True}, "model.tie_embeddings True"),
        ({"embedding_norm": False}, "model.embedding_norm False"),
        ({"ffn_size": 100}, "feed-forward width 100, there 96"),
        ({"pattern": "KG"}, "the paper's code has no gated_deltanet"),
        ({"layers": {"K": {"qk_norm": "rmsnorm"}}}, "layer 1: qk_norm 'rmsnorm', there 'layernorm'"),
        ({"layers": {"K": {"state_bias": True}}}, "layer 1: state_bias True, there False"),
        ({"layers": {"K": {"num_heads": 2}}}, "layer 0: num_heads 4, there 2"),
    ],
)
def test_what_the_papers_code_does_not_have_is_refused_by_key(changes, words):
    with pytest.raises(NotSupported, match=words):
        upstream_config(complete(section(**{"pattern": "WK", **changes})))
