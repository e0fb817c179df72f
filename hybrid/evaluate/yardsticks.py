"""Yardsticks for a model's held-out loss: an interpolated token bigram and xz on the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.data.store import train_tokens
from hybrid.data.validation import ValidationSet
from hybrid.errors import DataError
from hybrid.files import read_json, write_json
from hybrid.recipe.schema import DataSection

Pairs = tuple[np.ndarray, np.ndarray]

STRENGTHS = (5, 20, 50, 100, 300)
"""The weights m of the unigram that are tried; the one best on the held-out text counts."""

CACHE = "yardsticks.json"
"""In the data folder: results by what they were computed from."""

TOKENS_AT_ONCE = 1 << 20
"""Training tokens counted at a time."""


@dataclass(frozen=True)
class Yardsticks:
    """Bits per byte of the held-out text a model is scored on."""

    bigram: float
    strength: int
    """The bigram's best m."""
    xz: float
    tokens: int
    """Scored tokens."""
    bytes: int
    """Their bytes."""


def measure(data: DataSection, tokens: int | None = None) -> Yardsticks:
    """Measure both yardsticks on the validation set of at most `tokens` tokens (`train.eval_tokens`).

    Results are kept in the data folder and computed again when the shards, or what is held out, changed.
    """
    folder = Path(data.folder)
    key = _key(folder, data, tokens)
    known = _read_cache(folder / CACHE)
    with contextlib.suppress(KeyError, TypeError):  # new, or damaged and worth nothing
        return Yardsticks(**known[key])
    result = _measure(data, tokens)
    write_json(folder / CACHE, {**known, key: asdict(result)})
    return result


def _measure(data: DataSection, tokens: int | None) -> Yardsticks:
    scored = ValidationSet(data, tokens)
    before, after = _pairs(list(scored.arrays()))
    bigram = score_bigram(_training_pairs(train_tokens(data)), before, after, scored.vocab_size)
    bits = bigram.nats / math.log(2)
    compressed = 8 * xz_bytes(scored.raw_bytes())
    return Yardsticks(
        bits / scored.bytes, bigram.strength, compressed / scored.bytes, len(after), scored.bytes
    )


def _training_pairs(documents: Iterable[np.ndarray]) -> Iterator[Pairs]:
    """Pair the tokens inside each document, many documents at a time."""
    waiting: list[np.ndarray] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document)
        if size >= TOKENS_AT_ONCE:
            yield _pairs(waiting)
            waiting, size = [], 0
    if waiting:
        yield _pairs(waiting)


def _pairs(documents: list[np.ndarray]) -> Pairs:
    """Pair every token with the one after it in its document."""
    return np.concatenate([d[:-1] for d in documents]), np.concatenate([d[1:] for d in documents])


def _key(folder: Path, data: DataSection, tokens: int | None) -> str:
    """Hash what results depend on: the shards (their report), what of them is held out, and the cap."""
    used = {name: source.validation for name, source in data.sources.items()}
    # the context bounds what one document gives to a capped set
    facts = json.dumps([used, tokens, data.context if tokens else None], sort_keys=True)
    return hashlib.sha256((folder / "report.json").read_bytes() + facts.encode()).hexdigest()[:16]


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return read_json(path, {})
    except (FileNotFoundError, DataError):  # absent, or damaged and worth nothing
        return {}


@dataclass(frozen=True)
class Bigram:
    """Result of the bigram model."""

    nats: float
    """Loss of all scored tokens together."""
    strength: int
    """The best m."""


def score_bigram(
    training: Iterable[Pairs],
    before: np.ndarray,
    after: np.ndarray,
    vocab_size: int,
) -> Bigram:
    """Compute the loss of the interpolated bigram p(b | a) = (count(a, b) + m p(b)) / (count(a) + m).

    count(a, b) counts the pairs of the training text, count(a) those that begin with a, so that p sums to 1.
    p(b) = (count(b) + 1) / (pairs + vocab_size) is the unigram with add-one smoothing: nothing is impossible.
    Counts are raw: a source's sampling weight plays no part.

    Args:
        training: training pairs as (`before` `[n]`, `after` `[n]`) integer arrays, of any n.
        before, after: held-out pairs `[N]`; every `after` is scored, given its `before`.
    """
    keys, inverse = np.unique(_keys(before, after, vocab_size), return_inverse=True)
    pair_counts = np.zeros(len(keys), np.int64)  # only of pairs that are looked up, so that memory is bounded
    first = np.zeros(vocab_size, np.int64)
    second = np.zeros(vocab_size, np.int64)
    for left, right in training:
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
    """Measure `text` as `xz -9e` compresses it."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
