"""What the tokenizer is trained on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from hybrid.data.preparation.shards import content_hash, held_out
from hybrid.data.preparation.sources import list_inputs
from hybrid.data.preparation.tokenizer_training import SAMPLED_RUN, training_sample
from hybrid.recipe.schema import SourceSection

from .corpus import write_jsonl


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
