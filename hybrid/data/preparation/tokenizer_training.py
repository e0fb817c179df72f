"""Training a tokenizer on a sample of the training documents."""

from __future__ import annotations

import io
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from hybrid.data.tokenizer import SPACE_MARK, Tokenizer, refuse_surrogates
from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .inputs import Input, Skips
from .readers import read_documents
from .shards import content_hash, held_out

TRAINING_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "max_sentence_length": 1048576,
    "user_defined_symbols": ["\n", "\t"],
    "unk_id": 0,
    "bos_id": 1,
    "eos_id": 2,
    "pad_id": 3,
    "minloglevel": 2,
}

# Longer lines are cut for training only: sentencepiece leaves out lines over 2^20 bytes.
LONGEST_TRAINING_LINE = 100_000

FIXED_IDS = 256 + 4 + len(TRAINING_OPTIONS["user_defined_symbols"])
"""Ids that are neither characters nor joined ones: bytes, control and user-defined ids."""
ALWAYS_CHARACTERS = 256
"""Ids that characters may take whatever the vocabulary's size; beyond, they get half of it."""

# Documents are sampled in runs of characters, so that one huge document neither fills the sample nor is left
# out whole.
SAMPLED_RUN = 16384

PACKED_RATIO = 4
"""Bytes of text in a byte of a compressed file, roughly."""


@dataclass
class TrainingNotes:
    """What training left out of the tokenizer's sample (the text itself still round-trips)."""

    lines: int = 0
    lines_with_nul: int = 0
    scripts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Script -> `characters` in the sample, those `in_bytes` (no id of their own), and distinct `kinds`."""


def training_sample(sources: dict[str, tuple[SourceSection, list[Input]]], budget: int) -> list[str]:
    """Take about `budget` bytes of the sources' training documents (all of them when they are fewer).

    Held-out documents are left out. What is taken depends on the documents' contents alone.
    """
    total = sum(
        item.size * (PACKED_RATIO if item.packed else 1) for _, inputs in sources.values() for item in inputs
    )
    rate = min(1.0, budget / max(1, total))
    return [text for section, inputs in sources.values() for text in _sample_source(section, inputs, rate)]


def _sample_source(section: SourceSection, inputs: list[Input], rate: float) -> list[str]:
    hashes = array("Q")
    taken: list[tuple[int, str]] = []
    for item in inputs:
        for text in read_documents(item, section, Skips()):
            digest = content_hash(text.encode("utf-8"))
            hashes.append(digest)
            taken += [(digest, run) for run in _sampled_runs(text, digest, rate)]
    every = np.array(hashes, np.uint64)
    out = set(every[held_out(every, section.validation)].tolist())
    return [run for digest, run in taken if digest not in out]


def _sampled_runs(text: str, digest: int, rate: float) -> Iterator[str]:
    if rate == 1:
        yield text
        return
    for number, start in enumerate(range(0, len(text), SAMPLED_RUN)):
        mixed = (digest ^ (number * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**64
        if mixed >> 32 < rate * 2**32:
            yield text[start : start + SAMPLED_RUN]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tuple[Tokenizer, TrainingNotes]:
    """Train a BPE tokenizer of exactly `vocab_size` ids.

    Raises DataError when there is no text or the vocabulary does not fit it, naming the size that does.
    """
    lines, notes = _training_lines(texts)
    if not lines:
        nul = f" ({notes.lines_with_nul} lines with NUL are left out)" if notes.lines_with_nul else ""
        raise DataError(
            f"no text to train the tokenizer on{nul}: every source is empty or held out for validation, or "
            "data.tokenizer_sample_bytes is too small"
        )
    model = io.BytesIO()
    counts = _count_characters(lines)
    lines, options = _fit_characters(lines, counts, vocab_size)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **options
        )
    except RuntimeError as error:
        raise DataError(_reason(str(error), vocab_size)) from None
    tokenizer = Tokenizer(model.getvalue(), "the trained tokenizer")
    notes.scripts = _scripts(counts, tokenizer)
    return tokenizer, notes


def _count_characters(lines: list[str]) -> NDArray[np.int64]:
    """Count each character of the lines, by code point."""
    counts = np.zeros(0x110000, np.int64)
    for start in range(0, len(lines), 10_000):
        text = "".join(lines[start : start + 10_000])
        counts += np.bincount(np.frombuffer(text.encode("utf-32-le"), np.uint32), minlength=0x110000)
    return counts


def _fit_characters(
    lines: list[str], counts: NDArray[np.int64], vocab_size: int
) -> tuple[list[str], dict[str, Any]]:
    """Choose lines and options for texts that the usual ones do not fit.

    The space gets an id also where it is rare or missing. Where characters would fill the vocabulary (as of
    Chinese) the rarest are left to bytes: lines are cut at them, as sentencepiece itself leaves out at most
    2 %."""
    options = dict(TRAINING_OPTIONS)
    total, coverage = int(counts.sum()), options["character_coverage"]
    room = vocab_size - FIXED_IDS
    if counts[ord(" ")] <= (1 - coverage) * total:
        options["required_chars"] = SPACE_MARK
        room -= 1
    most = max(room // 2, min(room, ALWAYS_CHARACTERS))
    frequent = np.argsort(-counts, kind="stable")
    needed = int(np.searchsorted(np.cumsum(counts[frequent]), coverage * total)) + 1
    if 0 < most < needed:
        options["character_coverage"] = 1.0
        rare = {int(code): "\n" for code in frequent[most:] if counts[code]}
        lines = [part for line in lines for part in line.translate(rare).split("\n") if part]
    return lines, options


def _scripts(counts: NDArray[np.int64], tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Count the sample's characters by script, as Unicode names them, and those without an id."""
    known = {tokenizer.bytes_of(token) for token in range(tokenizer.vocab_size)}
    known -= {bytes([byte]) for byte in range(128, 256)}
    found: dict[str, dict[str, int]] = {}
    for code in np.flatnonzero(counts):
        character, count = chr(code), int(counts[code])
        letter = unicodedata.category(character)[0] in "LM"
        script = unicodedata.name(character, "other").split()[0].lower() if letter else "digits and signs"
        entry = found.setdefault(script, {"characters": 0, "in_bytes": 0, "kinds": 0})
        entry["characters"] += count
        entry["in_bytes"] += 0 if character.encode() in known else count
        entry["kinds"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["characters"]))


def _reason(message: str, vocab_size: int) -> str:
    """Say sentencepiece's complaint in words."""
    if found := re.search(r"Please set it to a value <= (\d+)", message):
        return (
            f"data.vocab_size is {vocab_size}, but the text allows at most {found[1]}; use that or more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        needed = f"the text's characters alone need {found[1]}; use that or more"
        return f"data.vocab_size is {vocab_size}, but {needed}"
    return f"training a tokenizer of {vocab_size} ids failed: {message}"


def _training_lines(texts: Iterable[str]) -> tuple[list[str], TrainingNotes]:
    """Cut texts to lines as sentencepiece takes them: no NUL, no U+2581, none empty, none too long."""
    lines: list[str] = []
    notes = TrainingNotes()
    for text in texts:
        refuse_surrogates(text)
        for line in text.split("\n"):
            notes.lines += 1
            if "\0" in line:
                notes.lines_with_nul += 1
                continue
            for part in line.split(SPACE_MARK):
                lines += [
                    part[at : at + LONGEST_TRAINING_LINE] for at in range(0, len(part), LONGEST_TRAINING_LINE)
                ]
    return lines, notes
