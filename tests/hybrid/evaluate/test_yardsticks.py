"""The bigram against a brute-force count, and xz."""

import json
import lzma
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hybrid.errors import DataError
from hybrid.evaluate.yardsticks import STRENGTHS, measure, score_bigram, xz_bytes


def brute_force(training, held_out, vocab_size, m):
    pairs, first, second = Counter(training), Counter(a for a, _ in training), Counter(b for _, b in training)
    loss = 0.0
    for a, b in held_out:
        p_b = (second[b] + 1) / (len(training) + vocab_size)
        loss -= math.log((pairs[a, b] + m * p_b) / (first[a] + m))
    return loss


def arrays(pairs):
    left, right = zip(*pairs, strict=True)
    return np.array(left, np.uint16), np.array(right, np.uint16)


@pytest.mark.parametrize("vocab_size", [7, 60_000])
def test_bigram_equals_brute_force_with_pieces_of_any_size(vocab_size):
    rng = np.random.default_rng(0)
    training = [(int(a), int(b)) for a, b in rng.integers(0, 7, (500, 2)) ** 2 % 7]
    held_out = [(int(a), int(b)) for a, b in rng.integers(0, 7, (90, 2))]
    expected = {m: brute_force(training, held_out, vocab_size, m) for m in STRENGTHS}
    best = min(expected, key=expected.get)
    pieces = [arrays(training[:1]), arrays(training[1:320]), arrays(training[320:])]
    result = score_bigram(pieces, *arrays(held_out), vocab_size)
    assert result.strength == best
    assert result.nats == pytest.approx(expected[best], rel=1e-12)


def test_bigram_probabilities_sum_to_one_over_the_next_token(monkeypatch):
    monkeypatch.setattr("hybrid.evaluate.yardsticks.STRENGTHS", (20,))
    training = arrays([(0, 1), (1, 2), (2, 0), (0, 1), (0, 3)])
    for a in (0, 3, 4):  # seen often, seen only as a last token, never seen
        losses = [score_bigram([training], *arrays([(a, b)]), 5).nats for b in range(5)]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1.0)


def test_bigram_keys_do_not_overflow_narrow_token_types():
    high = (np.array([65_000], np.uint16), np.array([65_001], np.uint16))
    result = score_bigram([high] * 10, *high, 65_536)
    unigram = 11 / (10 + 65_536)
    assert result.strength == 5
    assert result.nats == pytest.approx(-math.log((10 + 5 * unigram) / 15), rel=1e-12)


def test_xz_is_the_size_of_the_strongest_preset():
    text = b"In the beginning " * 50
    assert xz_bytes(text) == len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) < len(text)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A small prepared corpus of two sources."""
    from hybrid.data.preparation.prepare import prepare
    from hybrid.recipe.schema import DataSection, SourceSection

    root = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        lines = [f"name_{number} = call({i}, {i * number % 7})\n" for i in range(20 + number)]
        (root / f"{number}.txt").write_text("é".join(lines), encoding="utf-8")
    sources = {
        name: SourceSection(paths=[str(root / pattern)], format="text", validation=0.3)
        for name, pattern in (("few", "1*.txt"), ("rest", "[2-9]*.txt"))
    }
    data = DataSection(str(root / "data"), sources, vocab_size=290, context=64)
    prepare(data, processes=1)
    return data


@pytest.mark.parametrize("cap", [None, 700])
def test_both_are_measured_on_exactly_what_the_model_is_scored_on(prepared, cap):
    from hybrid.data.store import train_tokens
    from hybrid.data.validation import ValidationSet

    scored = ValidationSet(prepared, cap)
    held_out = []
    for batch in scored:
        counted = batch.labels != -100
        held_out += zip(batch.ids[counted].tolist(), batch.labels[counted].tolist(), strict=True)
    training = []
    for ids in train_tokens(prepared):
        training += zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)
    nats = {m: brute_force(training, held_out, scored.vocab_size, m) for m in STRENGTHS}
    result = measure(prepared, cap)
    assert result.tokens == len(held_out)
    assert result.bytes == scored.bytes == len(scored.raw_bytes())
    assert result.strength == min(nats, key=nats.get)
    assert result.bigram == pytest.approx(min(nats.values()) / math.log(2) / scored.bytes, rel=1e-9)
    assert result.xz == pytest.approx(8 * xz_bytes(scored.raw_bytes()) / scored.bytes, rel=1e-12)


def test_results_are_kept_until_cap_split_or_shards_change(prepared, monkeypatch):
    first = measure(prepared, 700)
    (cache,) = (path for path in Path(prepared.folder).iterdir() if path.name == "yardsticks.json")
    calls = []

    def fresh(data, tokens, say):
        calls.append(tokens)
        return first

    monkeypatch.setattr("hybrid.evaluate.yardsticks._measure", fresh)
    assert measure(prepared, 700) == first
    assert calls == []
    measure(prepared, 701)
    few = replace(prepared.sources["few"], validation=0.2)
    measure(replace(prepared, sources={**prepared.sources, "few": few}), 700)
    assert calls == [701, 700]
    kept = json.loads(cache.read_text())
    for wrong in (
        "{ damaged",
        "[]",
        json.dumps(dict.fromkeys(kept, 1)),
        *(
            json.dumps({key: {**entry, name: value} for key, entry in kept.items()})
            for name in asdict(first)
            for value in ("1", None, True, -1, math.nan)
        ),
        json.dumps({key: {**entry, "more": 1} for key, entry in kept.items()}),
    ):
        calls.clear()
        cache.write_text(wrong)
        assert measure(prepared, 700) == first
        assert calls == [700], wrong


def test_a_cache_that_can_be_neither_read_nor_written_fails_nothing(prepared, monkeypatch):
    """A folder shared with those who may not write there."""
    first = measure(prepared, 700)
    cache = Path(prepared.folder) / "yardsticks.json"
    cache.unlink()
    cache.mkdir()
    assert measure(prepared, 700) == first
    cache.rmdir()


@pytest.mark.parametrize("at_once", [1 << 20, 50])
def test_the_count_is_capped_and_told(prepared, monkeypatch, at_once):
    from hybrid.evaluate import yardsticks

    said, pairs = [], 0
    monkeypatch.setattr(yardsticks, "TOKENS_AT_ONCE", at_once)
    everything = sum(len(before) for before, _ in yardsticks._training_pairs(prepared, said.append))
    monkeypatch.setattr(yardsticks, "TRAINING_TOKENS", 1000)
    pairs = sum(len(before) for before, _ in yardsticks._training_pairs(prepared, said.append))
    assert everything > 10 * pairs > 0 or at_once == 50
    assert pairs <= 1000 + min(at_once, 2000)
    assert said[0].startswith("yardsticks (train.yardsticks): counting ")
    assert said[1].startswith("yardsticks (train.yardsticks): counting 1,000 training tokens of ")
    monkeypatch.setattr(yardsticks, "SCORED_TOKENS", 100)
    with pytest.raises(DataError, match=r"at most 100: set train\.eval_tokens"):
        measure(prepared, 703)
