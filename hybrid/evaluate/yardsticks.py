"""What a model's held-out loss is worth: an interpolated token bigram and xz on the same bytes."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

STRENGTHS = (5, 20, 50, 100, 300)
"""The weights m of the unigram that are tried; the one best on the held-out text counts."""

LN2 = math.log(2)


@dataclass(frozen=True)
class Bigram:
    """Result of the bigram model."""

    nats: float
    """Loss of all scored tokens together."""
    strength: int
    """The best m."""


def score_bigram(
    pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    before: np.ndarray,
    after: np.ndarray,
    vocab_size: int,
) -> Bigram:
    """Loss of the interpolated bigram p(b | a) = (count(a, b) + m p(b)) / (count(a) + m).

    count(a, b) counts the pairs of the training text, count(a) those that begin with a, so that p sums to 1.
    p(b) = (count(b) + 1) / (pairs + vocab_size) is the unigram with add-one smoothing: nothing is impossible.
    Counts are raw: a source's sampling weight plays no part.

    Args:
        pieces: training pairs as (`before` `[n]`, `after` `[n]`) integer arrays, in pieces of any size.
        before, after: held-out pairs `[N]`; every `after` is scored, given its `before`.
    """
    keys, inverse = np.unique(_keys(before, after, vocab_size), return_inverse=True)
    pair_counts = np.zeros(len(keys), np.int64)  # only of pairs that are looked up, so that memory is bounded
    first = np.zeros(vocab_size, np.int64)
    second = np.zeros(vocab_size, np.int64)
    for left, right in pieces:
        first += np.bincount(left, minlength=vocab_size)
        second += np.bincount(right, minlength=vocab_size)
        seen, counts = np.unique(_keys(left, right, vocab_size), return_counts=True)
        at = np.searchsorted(keys, seen)
        at[at == len(keys)] = 0
        known = keys[at] == seen
        pair_counts[at[known]] += counts[known]
    unigram = (second + 1) / (second.sum() + vocab_size)
    joint, history, fallback = pair_counts[inverse.reshape(-1)], first[before], unigram[after]
    losses = {m: -float(np.log((joint + m * fallback) / (history + m)).sum()) for m in STRENGTHS}
    strength = min(losses, key=losses.__getitem__)
    return Bigram(losses[strength], strength)


def _keys(left: np.ndarray, right: np.ndarray, vocab_size: int) -> np.ndarray:
    return left.astype(np.int64) * vocab_size + right


def xz_bytes(text: bytes) -> int:
    """Size of `text` as `xz -9e` compresses it."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
