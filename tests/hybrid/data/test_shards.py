"""A shard's form, which documents are held out, and how files are grouped into units."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybrid.data.preparation.prepare import prepare
from hybrid.data.preparation.readers import Input
from hybrid.data.preparation.shards import content_hash, held_out, make_units, token_dtype
from hybrid.data.tokenizer import Tokenizer
from hybrid.errors import DataError

from .corpus import digits_data


def test_a_shard_holds_begin_text_end_with_counts(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["12", "", "345"]})
    report = prepare(data, processes=1)
    tokenizer = Tokenizer.load(tmp_path / "prepared" / "tokenizer.model")
    one, two, three, four, five = (tokenizer.encode(digit)[0] for digit in "12345")
    stored = np.fromfile(tmp_path / "prepared/a/00000-a.tokens", "<u2")
    assert stored.tolist() == [1, one, two, 2, 1, three, four, five, 2]
    index = np.load(tmp_path / "prepared/a/00000-a.index.npy")
    assert index.tolist() == [[4, 2, content_hash(b"12")], [5, 3, content_hash(b"345")]]
    source = report.sources["a"]
    assert (source.documents, source.bytes, source.tokens, source.held_out) == (2, 5, 9, 0)
    assert source.skipped == {"empty document": 1}
    assert (report.built, report.kept, report.missing) == (1, 0, [])
    assert json.loads((tmp_path / "prepared/report.json").read_text()) == report.to_json()
    assert "skipped 1: empty document" in str(report)


def test_large_vocabularies_are_stored_in_32_bits() -> None:
    assert [token_dtype(size).str for size in (65536, 65537)] == ["<u2", "<u4"]


def test_the_split_goes_by_content() -> None:
    hashes = np.array([0, 2**62, 2**63, 2**64 - 1], np.uint64)
    assert held_out(hashes, 0.0).tolist() == [False] * 4
    assert held_out(hashes, 0.25).tolist() == [True, False, False, False]
    assert held_out(hashes, 0.5).tolist() == [True, True, False, False]
    assert held_out(hashes, 1.0).tolist() == [True] * 4
    # a share that reaches no document holds out the lowest hash, but never everything
    assert held_out(hashes[1:], 0.01).tolist() == [True, False, False]
    assert held_out(hashes[3:], 0.01).tolist() == [False]
    assert held_out(hashes[[3, 3]], 0.01).tolist() == [False, False]
    with pytest.raises(DataError, match=r"share is 1\.5; it must be from 0 to 1"):
        held_out(hashes, 1.5)


def test_a_share_below_one_never_takes_every_document() -> None:
    low = np.array([1, 2, 2], np.uint64)  # all hashes lie in the share
    assert held_out(low, 0.5).tolist() == [True, False, False]
    assert held_out(low[:1], 0.5).tolist() == [False]
    assert held_out(low, 1.0).tolist() == [True, True, True]


def test_small_files_share_a_shard() -> None:
    def text(size: int, number: int) -> Input:
        return Input(f"/x/{number}.txt", f"/x/{number}.txt", "text", size)

    half = 1 << 19
    inputs = [text(half, 0), text(half, 1), text(1, 2), text(2 << 20, 3), text(5, 4)]
    inputs.insert(4, Input("/x/z.jsonl", "/x/z.jsonl", "jsonl", 3))
    units = make_units("s", inputs)
    assert [(unit.name, len(unit.inputs)) for unit in units] == [
        ("00000-0", 2),
        ("00001-2", 1),
        ("00002-3", 1),
        ("00003-z", 1),
        ("00004-4", 1),
    ]
    assert [unit.size for unit in units] == [1 << 20, 1, 2 << 20, 3, 5]
    assert make_units("s", []) == []
