"""The bigram against a brute-force count, and xz."""

import lzma
import math
from collections import Counter

import numpy as np
import pytest

from hybrid.evaluate.yardsticks import STRENGTHS, score_bigram, xz_bytes


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
