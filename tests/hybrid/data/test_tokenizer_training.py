"""What the tokenizer is trained on, and texts it cannot be trained on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from hybrid.data.preparation.shards import content_hash, held_out
from hybrid.data.preparation.sources import list_inputs
from hybrid.data.preparation.tokenizer_training import SAMPLED_RUN, train_tokenizer, training_sample
from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .corpus import DIGITS, stdlib_texts, write_jsonl


def sample_of(tmp_path: Path, texts: list[str], share: float, budget: int) -> list[str]:
    section = SourceSection(paths=[str(write_jsonl(tmp_path / "x.jsonl", texts))], validation=share)
    return training_sample({"x": (section, list_inputs("x", section))}, budget)


def test_the_tokenizer_is_trained_on_training_documents_only(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(50)]
    hashes = np.array([content_hash(text.encode()) for text in texts], np.uint64)
    for share in (0.001, 0.3):  # the first holds out the one with the lowest hash
        kept = [text for text, out in zip(texts, held_out(hashes, share), strict=True) if not out]
        assert len(kept) < 50
        assert sample_of(tmp_path, texts, share, budget=1 << 20) == kept


def test_a_sample_smaller_than_the_text_is_fixed_and_takes_runs_of_long_documents(tmp_path: Path) -> None:
    texts = ["".join(random.Random(n).choices("abc ", k=SAMPLED_RUN * 40)) for n in range(3)]
    total = sum(map(len, texts))
    sample = sample_of(tmp_path, texts, 0, budget=total // 4)
    assert sample == sample_of(tmp_path, texts, 0, budget=total // 4)
    assert total / 8 < sum(map(len, sample)) < total / 2
    assert {len(run) for run in sample} == {SAMPLED_RUN}
    assert all(any(run in text for text in texts) for run in sample)


def test_training_twice_gives_the_same_model() -> None:
    texts = stdlib_texts(3)
    (first, _), (second, _) = train_tokenizer(texts, 500), train_tokenizer(texts, 500)
    assert first.fingerprint == second.fingerprint


def test_too_large_a_vocabulary_names_the_largest_possible() -> None:
    """google/sentencepiece#727, #1079: the size it names is the largest that works."""
    lines = [f"the quick brown fox {number} jumps over the lazy dog" for number in range(20)]
    with pytest.raises(DataError, match=r"vocab_size is 8000, but the text allows at most (\d+)") as caught:
        train_tokenizer(lines, 8000)
    largest = int(str(caught.value).split("at most ")[1].split(";")[0])
    assert train_tokenizer(lines, largest)[0].vocab_size == largest
    with pytest.raises(DataError, match=f"at most {largest}"):
        train_tokenizer(lines, largest + 1)


def test_too_small_a_vocabulary_names_the_smallest_possible() -> None:
    with pytest.raises(DataError, match=f"vocab_size is 20, .* need {DIGITS}"):
        train_tokenizer(["0123456789 abc\n"], 20)
    assert train_tokenizer(["0123456789 abc\n"], DIGITS)[0].vocab_size == DIGITS


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"], ["\0"]])
def test_a_tokenizer_of_no_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text to train the tokenizer on"):
        train_tokenizer(texts, 300)


def test_lines_with_nul_are_left_out_of_training_and_counted() -> None:
    """google/sentencepiece#331."""
    texts = ["0123456789 abc\nwith \0 nul\nabc"] * 3
    tokenizer, notes = train_tokenizer(texts, DIGITS)
    assert (notes.lines, notes.lines_with_nul) == (9, 3)
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    with pytest.raises(DataError, match=r"no text .* \(2 lines with NUL are left out\)"):
        train_tokenizer(["a\0b\n\0"], 300)


def _written(first: int, last: int, spaces: bool = False) -> list[str]:
    """Lines of letters from a range of code points, frequent ones first."""
    draw = random.Random(first)
    letters = [chr(code) for code in range(first, last)]
    shares = [1 / (rank + 1) for rank in range(len(letters))]
    lines = ["".join(draw.choices(letters, shares, k=60)) for _ in range(200)]
    return [" ".join(line[at : at + 6] for at in range(0, 60, 6)) for line in lines] if spaces else lines


SCRIPTS = {
    "dna": ["".join(random.Random(n).choices("ACGT", k=70)) for n in range(200)],
    "chinese": _written(0x4E00, 0x6500),
    "japanese": _written(0x3041, 0x3097),
    "thai": _written(0x0E01, 0x0E3A),
    "arabic": _written(0x0627, 0x064A, spaces=True),
    "emoji": _written(0x1F300, 0x1F600),
    "code": [text[:20_000] for text in stdlib_texts(2)],
}


@pytest.mark.parametrize("vocab_size", [400, 600])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_gets_a_tokenizer_that_keeps_every_text(script: str, vocab_size: int) -> None:
    """Corpora without a space, or of more characters than the vocabulary has room for."""
    tokenizer, notes = train_tokenizer(SCRIPTS[script], vocab_size)
    assert tokenizer.vocab_size == vocab_size
    others = [" ", "a  b ", "\t\r\n", "".join(map(chr, range(256))), "漢字 ไทย عربي 👩‍👩‍👧 \U0010ffff"]
    for text in [*SCRIPTS[script][:20], *others]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    size = sum(len(text.encode()) for text in SCRIPTS[script])
    assert sum(len(tokenizer.encode(text)) for text in SCRIPTS[script]) < size
    counted = sum(entry["characters"] for entry in notes.scripts.values())
    assert counted == sum(len(text.replace("\n", "")) for text in SCRIPTS[script])


def test_characters_without_an_id_are_counted_by_script() -> None:
    _, notes = train_tokenizer([*SCRIPTS["chinese"], *SCRIPTS["dna"]], 400)
    assert notes.scripts["latin"] == {"characters": 14_000, "in_bytes": 0, "kinds": 4}
    assert 0 < notes.scripts["cjk"]["in_bytes"] < notes.scripts["cjk"]["characters"] == 12_000
