"""The paper's code to our model folders and back, through the command."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.checkpoint.tensor_files import Reader
from hybrid.cli.main import main
from hybrid.convert.check import logits
from hybrid.convert.common import Options, same_bits
from hybrid.convert.model_folder import FORMAT
from hybrid.recipe.letters import layer_specs
from hybrid.verify.vectors import below, read_cases

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
