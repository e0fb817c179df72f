"""Byte-level tokenizers of Hugging Face: lossless, with the ids of transformers, and in training."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybrid.checkpoint.run import load_run, tokenizer_of
from hybrid.cli.main import main
from hybrid.data.preparation.prepare import prepare
from hybrid.data.store import Store
from hybrid.data.tokenizer import PROBES, Tokenizer
from hybrid.errors import DataError
from hybrid.files import write_json
from hybrid.recipe.schema import DataSection, SourceSection
from tests.hybrid.data.corpus import stdlib_texts
from tests.hybrid.data.test_tokenizer import TEXTS

ENDS = {"bos_token": None, "eos_token": "<|end|>"}


def write_tokenizer(folder, prefix=False, normalizer=None, config=ENDS):
    """A byte-level BPE as Hugging Face saves it."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    fast.decoder = decoders.ByteLevel()
    if normalizer:
        fast.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=special)
    fast.train_from_iterator(stdlib_texts(6), trainer)
    fast.add_tokens(["<tool>"])
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def test_it_is_lossless_with_the_ids_of_transformers_and_control_symbols_are_text(folder, tokenizer):
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in (*PROBES, *TEXTS, *stdlib_texts(8)[6:], "a <tool> b"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert ids == theirs.encode(text, add_special_tokens=False)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == text
    assert tokenizer.decode(tokenizer.encode("<|end|>")) == "<|end|>"
    assert tokenizer.eos_id not in tokenizer.encode("text <|end|> text")
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 0, 501)
    assert tokenizer.bytes_of(0) == b""
    assert [tokenizer.bytes_of(i) for i in tokenizer.encode("é")] == [b"\xc3", b"\xa9"]


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_one_file_holds_it_whole_and_is_the_same_tokenizer(folder, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.model")
    for place in (tmp_path, tmp_path / "tokenizer.model", folder / "tokenizer.json"):
        assert Tokenizer.load(place).fingerprint == tokenizer.fingerprint
    other = write_tokenizer(tmp_path / "other", config={"bos_token": "<|start|>", "eos_token": "<|end|>"})
    assert Tokenizer.load(other).bos_id == 1
    assert Tokenizer.load(other).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix": True}, "not lossless"),
        ({"normalizer": normalizers.Lowercase()}, "not lossless"),
        ({"config": {}}, "neither a begin nor an end id"),
        ({"config": {"eos_token": "</s>"}}, "no id for '</s>'"),
    ],
)
def test_what_loses_text_or_has_no_ends_is_refused(changes, words, tmp_path):
    with pytest.raises(DataError, match=words):
        Tokenizer.load(write_tokenizer(tmp_path, **changes))


def test_a_normalizer_to_nfc_is_left_out_and_damage_is_named(tmp_path):
    write_tokenizer(tmp_path, normalizer=normalizers.NFC())
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode("e\u0301")) == "e\u0301"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        Tokenizer.load(tmp_path)


def test_a_converted_transformer_generates_prepares_and_trains_with_its_own_tokenizer(
    folder, tmp_path, capsys
):
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    source = tmp_path / "source"
    LlamaForCausalLM(config).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((folder / name).read_bytes())
    for place, form in (("mine", "hybrid"), ("theirs", "hf")):
        assert main(["convert", str(source), str(tmp_path / place), "--to", form, "--no-check"]) == 0
        found = load_run(tmp_path / place)[1]
        assert found.fingerprint == tokenizer_of(tmp_path / place) == Tokenizer.load(folder).fingerprint
        assert AutoTokenizer.from_pretrained(tmp_path / place).encode("def f") == found.encode("def f")
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "mine"), "--prompt", "def ", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    texts = tmp_path / "texts"
    texts.mkdir()
    for index, text in enumerate(stdlib_texts(12)):
        (texts / f"{index}.txt").write_text(text)
    sources = {"texts": SourceSection([str(texts)], validation=0.2)}
    data = DataSection(folder=str(tmp_path / "data"), sources=sources, tokenizer=str(tmp_path / "mine"))
    prepare(data)
    store = Store(data)
    assert store.fingerprint == tokenizer_of(tmp_path / "mine")
    ids = store.sources["texts"].read(0, 0, 50).tolist()
    assert ids[0] == 0
    assert any(text.startswith(store.tokenizer.decode(ids)[:40]) for text in stdlib_texts(12))
    recipe = {
        "base": str(tmp_path / "mine/recipe.yaml"),
        "data": {"folder": data.folder, "sources": {"texts": {"paths": [str(texts)], "validation": 0.2}},
                 "tokenizer": data.tokenizer, "context": 32},
        "optimizer": {"lr": 1e-3},
        "train": {"output": str(tmp_path / "run"), "steps": 1, "batch_size": 2, "eval_tokens": 64,
                  "init_from": str(tmp_path / "mine")},
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert main(["train", str(tmp_path / "recipe.json")]) == 0, capsys.readouterr().err
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf", "--no-check"]) == 0
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back.encode("def f") == store.tokenizer.encode("def f")
    assert back.eos_token == "<|end|>"
