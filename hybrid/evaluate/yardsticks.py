"""Yardsticks for a model's held-out loss: an interpolated token bigram and xz on the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.data.store import Store, train_tokens
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

TRAINING_TOKENS = 100_000_000
"""Training tokens counted at most: of more text every n-th document is taken. Half a minute."""

SCORED_TOKENS = 1 << 22
"""Held-out tokens measured at most, as xz takes a second for about a megabyte."""

SAID_SECONDS = 10.0
"""Between two lines that tell how far the count is."""

Say = Callable[[str], None]


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


def measure(data: DataSection, tokens: int | None = None, say: Say = print) -> Yardsticks:
    """Measure both yardsticks on the validation set of at most `tokens` tokens (`train.eval_tokens`).

    Results are kept in the data folder, where that can be written, and computed again when the shards, or
    what is held out, changed. `say` gets lines about what is being done.

    Raises DataError for more held-out text than SCORED_TOKENS, and for data that cannot be read.
    """
    folder = Path(data.folder)
    key = _key(folder, data, tokens)
    known = _read_cache(folder / CACHE)
    if (found := _stored(known.get(key))) is not None:
        return found
    result = _measure(data, tokens, say)
    with contextlib.suppress(OSError):  # the folder may be another's
        write_json(folder / CACHE, {**known, key: asdict(result)})
    return result


def _measure(data: DataSection, tokens: int | None, say: Say) -> Yardsticks:
    scored = ValidationSet(data, tokens)
    if scored.tokens > SCORED_TOKENS:
        raise DataError(
            f"the held-out text has {scored.tokens:,} tokens, and yardsticks are measured of at most "
            f"{SCORED_TOKENS:,}: set train.eval_tokens"
        )
    before, after = _pairs(list(scored.arrays()))
    bigram = score_bigram(_training_pairs(data, say), before, after, scored.vocab_size)
    say(f"yardsticks: compressing {scored.bytes:,} held-out bytes")
    bits = bigram.nats / math.log(2)
    compressed = 8 * xz_bytes(scored.raw_bytes())
    return Yardsticks(
        bits / scored.bytes, bigram.strength, compressed / scored.bytes, len(after), scored.bytes
    )


def _training_pairs(data: DataSection, say: Say) -> Iterator[Pairs]:
    """Pair the tokens inside each document, many documents or a stretch of a long one at a time."""
    total = sum(int(source.tokens[~source.held_out].sum()) for source in Store(data).sources.values())
    every = max(1, -(-total // TRAINING_TOKENS))
    of = f"{min(total, TRAINING_TOKENS):,} training tokens" + (f" of {total:,}" if every > 1 else "")
    say(f"yardsticks (train.yardsticks): counting {of}")
    waiting: list[np.ndarray] = []
    size, counted, said = 0, 0, time.monotonic()
    for document in train_tokens(data, every):
        for start in range(0, len(document) - 1, TOKENS_AT_ONCE):
            waiting.append(document[start : start + TOKENS_AT_ONCE + 1])
            size += len(waiting[-1])
            if size >= TOKENS_AT_ONCE:
                yield _pairs(waiting)
                waiting, counted, size = [], counted + size, 0
            if counted >= TRAINING_TOKENS:
                return
            if time.monotonic() > said + SAID_SECONDS:
                said = time.monotonic()
                say(f"yardsticks: {counted:,} of {of} counted")
    if waiting:
        yield _pairs(waiting)


def _pairs(documents: list[np.ndarray]) -> Pairs:
    """Pair every token with the one after it in its document."""
    return np.concatenate([d[:-1] for d in documents]), np.concatenate([d[1:] for d in documents])


def _key(folder: Path, data: DataSection, tokens: int | None) -> str:
    """Hash what results depend on: the shards (their report), what of them is held out, and the cap."""
    used = {name: source.validation for name, source in data.sources.items()}
    # the context bounds what one document gives to a capped set
    facts = json.dumps([used, tokens, data.context if tokens else None, TRAINING_TOKENS], sort_keys=True)
    return hashlib.sha256((folder / "report.json").read_bytes() + facts.encode()).hexdigest()[:16]


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, {})
    except (OSError, DataError):  # absent, another's, or damaged and worth nothing
        return {}


def _stored(entry: Any) -> Yardsticks | None:
    """Take results from the cache; None for what was never written there."""
    kinds = {field.name: float if field.name in ("bigram", "xz") else int for field in fields(Yardsticks)}
    if not isinstance(entry, dict) or entry.keys() != kinds.keys():
        return None
    right = (type(entry[name]) is kind and 0 < entry[name] < math.inf for name, kind in kinds.items())
    return Yardsticks(**entry) if all(right) else None


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
