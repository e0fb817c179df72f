"""Our models as Hugging Face folders and back through the command, their tokenizers with them."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from hybrid import recipe as recipes
from hybrid.checkpoint.run import load_run
from hybrid.cli.main import main
from hybrid.convert.common import complete, same_bits
from hybrid.data.tokenizer import PROBES, Tokenizer
from hybrid.errors import TrainError
from hybrid.generate import generate
from hybrid.train.resume import load_initial
from tests.hybrid.data.corpus import stdlib_texts
from tests.hybrid.data.test_tokenizer import TEXTS, trained
from tests.hybrid.mini import mini

from .models import ALL_KINDS


def convert(*arguments) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(trained(stdlib_texts(12), 600))


@pytest.fixture(scope="module")
def ours(tokenizer, tmp_path_factory):
    """A model folder of ours with layers of every kind."""
    folder = tmp_path_factory.mktemp("made")
    model = mini(ALL_KINDS, vocab_size=640)
    (folder / "recipe.yaml").write_text(recipes.to_yaml({"model": complete(model.section)}))
    save_file(model.state_dict(), folder / "model.safetensors")
    tokenizer.save(folder / "tokenizer.model")
    assert convert(folder, folder / "ours", "--no-check") == 0
    return folder / "ours"


@pytest.fixture(scope="module")
def theirs(ours):
    folder = ours.with_name("theirs")
    assert convert(ours, folder, "--to", "hf", "--shard-size", "500KB") == 0
    return folder


def test_a_model_comes_back_from_hugging_face_bit_for_bit(ours, theirs, tmp_path, capsys):
    report = json.loads((theirs / "conversion.json").read_text())
    assert report["check"]["largest_difference"] == 0
    assert not report["created"] | report["dropped"]
    assert not report["notes"]
    assert json.loads((theirs / "model.safetensors.index.json").read_text())["weight_map"]
    assert convert(theirs, tmp_path / "back") == 0, capsys.readouterr().err
    before, after = (load_file(folder / "model.safetensors") for folder in (ours, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    assert {p.name for p in (tmp_path / "back").iterdir()} == {
        "recipe.yaml", "model.safetensors", "tokenizer.model", "conversion.json"
    }  # fmt: skip
    load = [recipes.load(folder / "recipe.yaml", model_only=True) for folder in (ours, tmp_path / "back")]
    assert load[0].model == load[1].model


def test_what_transformers_saves_is_read_back(theirs, tmp_path):
    AutoModelForCausalLM.from_pretrained(theirs).save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(theirs).save_pretrained(tmp_path / "saved")
    assert convert(tmp_path / "saved", tmp_path / "back") == 0
    wanted = load_run(theirs)[0].state_dict()
    found = load_file(tmp_path / "back/model.safetensors")
    assert all(same_bits(wanted[name], tensor) for name, tensor in found.items())


def test_generate_reads_a_hugging_face_folder_and_the_pipeline_writes_the_same(ours, theirs):
    texts = []
    for folder in (ours, theirs):
        model, tokenizer, _ = load_run(folder)
        texts.append(generate(model.eval(), tokenizer, ["def "], max_tokens=12)[0].ids)
    assert texts[0] == texts[1]
    write = pipeline("text-generation", model=str(theirs), device="cpu")
    options = {"max_new_tokens": 12, "do_sample": False, "return_tensors": True}
    found = write("def ", **options)[0]["generated_token_ids"]
    assert found == [tokenizer.bos_id, *tokenizer.encode("def "), *texts[0]]
    batch = write(["def ", "import sys, os\nclass "], batch_size=2, **options)
    assert tuple(batch[0][0]["generated_token_ids"][-12:]) == texts[0]
    assert isinstance(write("def ", max_new_tokens=3)[0]["generated_text"], str)


def test_training_starts_from_a_hugging_face_folder_unless_its_tokenizer_is_another(theirs, tokenizer):
    model = mini(ALL_KINDS, seed=1, vocab_size=640)
    load_initial(model, str(theirs), tokenizer.fingerprint)
    wanted = load_run(theirs)[0].state_dict()
    assert all(torch.equal(wanted[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(TrainError, match="tokenizer"):
        load_initial(model, str(theirs), "0" * 64)


def test_the_tokenizer_gives_identical_ids(tokenizer, theirs):
    fast = AutoTokenizer.from_pretrained(theirs)
    runs = [text * count for text in (" ", "\n", "\t", "=", "a", " a", "\u2581") for count in (2, 7, 63)]
    for text in (*PROBES, *TEXTS, *runs, *stdlib_texts(20)[15:]):
        ids = tokenizer.encode(text)
        assert fast.encode(text, add_special_tokens=False) == ids
        assert fast(text)["input_ids"] == [tokenizer.bos_id, *ids]
        assert fast.decode(ids) == text
    assert (fast.bos_token_id, fast.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert fast.pad_token_id == 3
    assert fast.padding_side == "left"


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_has_identical_ids(tokenizer, theirs, text):
    fast = AutoTokenizer.from_pretrained(theirs)
    assert fast.encode(text, add_special_tokens=False) == tokenizer.encode(text)


def test_a_tokenizer_without_an_exact_form_stays_out_and_is_named(ours, tmp_path, capsys):
    for name in ("recipe.yaml", "model.safetensors"):
        (tmp_path / name).write_bytes((ours / name).read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(trained(stdlib_texts(8), 500, model_type="unigram"))
    assert convert(tmp_path, tmp_path / "theirs", "--to", "hf", "--no-check") == 0
    assert "no BPE model" in capsys.readouterr().out
    assert not (tmp_path / "theirs/tokenizer.json").exists()
    assert (tmp_path / "theirs/tokenizer.model").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 65}, "hidden_size is 65, model.hidden_size 64"),
        ({"model": None}, "no table 'model'"),
        ({"model": {"pattern": "K", "patern": "K"}}, "patern"),
    ],
)
def test_a_broken_config_is_refused_by_name(theirs, tmp_path, capsys, change, words):
    config = json.loads((theirs / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    save_file({"model.embedding.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    assert convert(tmp_path, tmp_path / "back") == 2
    assert words in capsys.readouterr().err
