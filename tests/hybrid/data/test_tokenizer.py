from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data.preparation.tokenizer_training import TRAINING_OPTIONS
from hybrid.data.tokenizer import Tokenizer
from hybrid.errors import DataError

from .corpus import stdlib_texts

TEXTS = [
    "",
    "\n",
    "\n\n\n",
    " ",
    "     five spaces     ",
    "\t\ttabs\t \t",
    "a\r\nb\rc\r\n",
    "nul\0in\0side",
    "\ufeffmark",
    "wait\u2026 for it",
    "\uff26\uff55\uff4c\uff4c \uff57\uff49\uff44\uff54\uff48",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f",
    "e\u0301\u0302\u0323 \u00e9 \u0061\u030a \u1e69",
    "<s></s><unk><pad> <0x0A> <s>\n</s>",
    "\u2581",
    "\u2581\u2581 two marks\u2581\nand one \u2581",
    "\u2028\u2029\x0b\x0c\x1c\x85 other line ends",
    "\ud7ff\ue000\U0010ffff",
    "\u4f60\u597d 0123456789 1e-4",
]


def trained(texts: list[str], size: int, **options: Any) -> bytes:
    model = io.BytesIO()
    lines = [line for text in texts for line in text.split("\n")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=size,
        **{**TRAINING_OPTIONS, **options},
    )
    return model.getvalue()


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_comes_back_unchanged(python_tokenizer: Tokenizer, text: str) -> None:
    """google/sentencepiece#650, #804, #520."""
    ids = python_tokenizer.encode(text)
    assert python_tokenizer.decode_bytes(ids) == text.encode()
    assert python_tokenizer.decode(ids) == text
    assert not set(ids) & {0, python_tokenizer.bos_id, python_tokenizer.eos_id, 3}
    assert all(0 <= token < 1000 for token in ids)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back_unchanged_also_streamed(python_tokenizer: Tokenizer, text: str) -> None:
    ids = python_tokenizer.encode(text)
    stream = python_tokenizer.stream()
    parts = [stream.push(token) for token in ids] + [stream.finish()]
    assert python_tokenizer.decode_bytes(ids) == text.encode()
    assert "".join(parts) == text


def test_the_space_mark_is_stored_as_its_three_bytes(python_tokenizer: Tokenizer) -> None:
    ids = python_tokenizer.encode("\u2581")
    assert [python_tokenizer.bytes_of(token) for token in ids] == [b"\xe2", b"\x96", b"\x81"]


def test_streaming_holds_back_an_unfinished_character(python_tokenizer: Tokenizer) -> None:
    """A four-byte emoji id by id (huggingface/swift-transformers#387)."""
    ids = python_tokenizer.encode("a\U0001f600b")
    stream = python_tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "\U0001f600", "b"]
    assert stream.finish() == ""


def test_streaming_ids_that_end_inside_a_character(python_tokenizer: Tokenizer) -> None:
    ids = python_tokenizer.encode("\U0001f600")[:2]
    stream = python_tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["", ""]
    assert stream.finish() == "\ufffd" == python_tokenizer.decode(ids)


def test_lines_with_newline_ids_are_the_ids_of_the_whole_text(python_tokenizer: Tokenizer) -> None:
    whole = sentencepiece.SentencePieceProcessor(model_proto=python_tokenizer.model)
    for text in stdlib_texts(40):
        if "\u2581" not in text:
            assert python_tokenizer.encode(text) == whole.encode(text)


def test_lone_surrogates_are_refused(python_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"character 2 of the text is the lone surrogate '\\ud83d'"):
        python_tokenizer.encode("ab\ud83d")


def test_ids_outside_the_vocabulary_are_refused(python_tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"id 1000 is outside .*vocabulary of 1000"):
        python_tokenizer.decode([5, 1000])


def test_control_ids_have_no_text(python_tokenizer: Tokenizer) -> None:
    ids = [python_tokenizer.bos_id, *python_tokenizer.encode("x"), python_tokenizer.eos_id, 3]
    assert python_tokenizer.decode(ids) == "x"


def test_saved_and_loaded_it_is_the_same(python_tokenizer: Tokenizer, tmp_path: Path) -> None:
    python_tokenizer.save(tmp_path / "copy.model")
    copy = Tokenizer.load(tmp_path / "copy.model")
    assert copy.fingerprint == python_tokenizer.fingerprint
    assert len(copy.fingerprint) == 64
    assert (copy.vocab_size, copy.bos_id, copy.eos_id) == (1000, 1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["copy.model"]


def test_a_given_unigram_model_is_encoded_whole() -> None:
    model = trained(stdlib_texts(8), 800, model_type="unigram")
    tokenizer = Tokenizer(model)
    whole = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in [*stdlib_texts(3), *TEXTS]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        if "\u2581" not in text:
            assert tokenizer.encode(text) == whole.encode(text)


def test_a_given_model_without_a_newline_piece_stays_equal_to_the_whole_text() -> None:
    model = trained(stdlib_texts(8), 800, user_defined_symbols=[])
    tokenizer = Tokenizer(model)
    whole = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in stdlib_texts(8):
        assert tokenizer.encode(text) == whole.encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"byte_fallback": False}, "no byte fallback"),
        ({"add_dummy_prefix": True}, "not lossless"),
        ({"normalization_rule_name": "nmt_nfkc"}, "not lossless"),
        ({"remove_extra_whitespaces": True}, "not lossless"),
        ({"bos_id": -1, "eos_id": -1}, "neither a begin nor an end id"),
    ],
)
def test_given_models_that_lose_text_are_refused_with_the_reason(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"given: {message}|given is {message}|given has {message}"):
        Tokenizer(trained(stdlib_texts(3), 500, **options), "given")


def test_a_model_without_begin_id_begins_with_its_end_id() -> None:
    tokenizer = Tokenizer(trained(stdlib_texts(3), 500, bos_id=-1, eos_id=1, pad_id=-1))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 1)


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\x0f"])
def test_files_that_are_no_model_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.model is not a sentencepiece model"):
        Tokenizer.load(tmp_path / "x.model")


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.model: No such file"):
        Tokenizer.load(tmp_path / "none.model")
