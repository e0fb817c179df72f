"""Folders that carry our code load with torch and transformers alone, and beside our package too."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybrid import recipe as recipes
from hybrid.cli.main import main
from hybrid.convert.common import complete
from hybrid.convert.hf.modeling import HybridForCausalLM
from hybrid.convert.hf.standalone import logits
from hybrid.errors import ConvertError
from tests.hybrid.data.corpus import stdlib_texts
from tests.hybrid.data.test_tokenizer import trained
from tests.hybrid.mini import ids, mini

from .models import ALL_KINDS

ELSEWHERE = """
import sys

for name in ("hybrid", "omegaconf", "deepspeed", "sentencepiece", "grain", "tensorboard"):
    sys.modules[name] = None  # as where they are not installed
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, scratch = sys.argv[1:]
ids = load_file(f"{scratch}/ids.safetensors")["ids"]
found = {}
for name in ("first", "saved"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        found[name] = model(ids).logits
    model.save_pretrained(f"{scratch}/{name}")
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True).save_pretrained(f"{scratch}/{name}")
    folder = f"{scratch}/{name}"
options = {"max_new_tokens": 8, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
found["generated"] = model.generate(ids, **options)
assert torch.equal(found["generated"], model.generate(ids, use_cache=False, **options))
save_file(found, f"{scratch}/found.safetensors")
"""


def convert(*arguments) -> int:
    return main(["convert", *map(str, arguments)])


def model_folder(folder, pattern, **changes):
    folder.mkdir()
    model = mini(pattern, vocab_size=640, **changes)
    (folder / "recipe.yaml").write_text(recipes.to_yaml({"model": complete(model.section)}))
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "tokenizer.model").write_bytes(trained(stdlib_texts(8), 600))
    return model


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model with every kind of layer, and its standalone folder."""
    folder = tmp_path_factory.mktemp("standalone")
    model = model_folder(folder / "ours", ALL_KINDS, tie_embeddings=True)
    options = ("--recipe", folder / "ours/recipe.yaml", "--to", "hf", "--standalone", "--no-check")
    assert convert(folder / "ours/model.safetensors", folder / "a folder.v1", *options) == 0
    (folder / "ours/tokenizer.model").rename(folder / "tokenizer.model")
    return model.eval(), folder / "a folder.v1"


def test_a_standalone_folder_loads_where_only_torch_and_transformers_are(alone, tmp_path):
    model, folder = alone
    prompt = ids(150, 2)
    save_file({"ids": prompt}, tmp_path / "ids.safetensors")
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, str(folder), str(tmp_path)], capture_output=True, text=True,
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    found = load_file(tmp_path / "found.safetensors")
    with torch.no_grad():
        wanted = model(prompt)[0]
    for name in ("first", "saved"):
        assert torch.equal(found[name], wanted), name
    assert found["generated"].shape == (2, 158)


def test_where_our_package_is_it_is_used_and_no_code_of_the_folder(alone, tmp_path):
    model, folder = alone
    for trusted in ({}, {"trust_remote_code": True}):
        loaded = AutoModelForCausalLM.from_pretrained(folder, **trusted)
        assert type(loaded) is HybridForCausalLM
        with torch.no_grad():
            assert torch.equal(loaded(ids(40)).logits, model(ids(40))[0])
    loaded.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert convert(folder, tmp_path / "back", "--no-check") == 0


def test_only_the_models_own_kinds_go_along_and_say_where_they_are_from(alone, tmp_path, capsys):
    model_folder(tmp_path / "ours", "WR")
    assert convert(tmp_path / "ours", tmp_path / "alone", "--to", "hf", "--standalone", "--no-check") == 0
    files = {path.name: path.read_text() for path in (tmp_path / "alone").glob("*.py")}
    assert {"layers_attention.py", "layers_rwkv7.py", "modeling_kvm_hybrid.py"} <= files.keys()
    assert not [name for name in files if "kvm_mixer" in name or "ovq" in name or "mamba" in name]
    for name, text in files.items():
        assert "SPDX-License-Identifier: Apache-2.0" in text.splitlines()[0], name
    assert len(list(alone[1].glob("*.py"))) > len(files)
    capsys.readouterr()
    assert convert(tmp_path / "ours", tmp_path / "other", "--standalone") == 2
    assert "--to hf" in capsys.readouterr().err


@pytest.mark.slow
def test_the_folder_is_checked_by_its_own_code(tmp_path, capsys):
    model_folder(tmp_path / "ours", "KR")
    assert convert(tmp_path / "ours", tmp_path / "alone", "--to", "hf", "--standalone") == 0
    assert json.loads((tmp_path / "alone/conversion.json").read_text())["check"]["largest_difference"] == 0
    (tmp_path / "alone/layers_rwkv7.py").unlink()
    with pytest.raises(ConvertError, match="does not load by itself"):
        logits(tmp_path / "alone", ids(9))
