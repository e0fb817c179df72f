"""The text a tokenizer is trained on: a fixed sample of the training documents."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from hybrid.recipe.schema import SourceSection

from .shards import content_hash, held_out
from .sources import Input, Skips, read_documents

# Documents are sampled in blocks, so that one huge document neither fills the sample nor is left out whole.
BLOCK = 16384  # characters
PACKED_RATIO = 4  # text per byte of a compressed file, roughly


def training_sample(sources: dict[str, tuple[SourceSection, list[Input]]], budget: int) -> list[str]:
    """About `budget` bytes of the sources' training documents (all of them when they are fewer).

    Held-out documents are left out. Which blocks are taken depends on the documents' contents alone.
    """
    total = sum(_text_size(item) for _, inputs in sources.values() for item in inputs)
    rate = min(1.0, budget / max(1, total))
    return [text for section, inputs in sources.values() for text in _sample_source(section, inputs, rate)]


def _sample_source(section: SourceSection, inputs: list[Input], rate: float) -> list[str]:
    hashes = array("Q")
    taken: list[tuple[int, str]] = []
    for item in inputs:
        for text in read_documents(item, section, Skips()):
            digest = content_hash(text.encode("utf-8"))
            hashes.append(digest)
            taken += [(digest, block) for block in _blocks(text, digest, rate)]
    every = np.frombuffer(hashes, np.uint64) if hashes else np.zeros(0, np.uint64)
    out = set(every[held_out(every, section.validation)].tolist())
    return [block for digest, block in taken if digest not in out]


def _blocks(text: str, digest: int, rate: float) -> Iterator[str]:
    if rate == 1:
        yield text
        return
    for number, start in enumerate(range(0, len(text), BLOCK)):
        mixed = (digest ^ (number * 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 % 2**64
        if mixed >> 32 < rate * 2**32:
            yield text[start : start + BLOCK]


def _text_size(item: Input) -> int:
    packed = item.path.endswith((".gz", ".zst")) or item.format == "parquet"
    return item.size * (PACKED_RATIO if packed else 1)
