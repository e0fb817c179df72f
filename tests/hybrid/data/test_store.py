"""Prepared data are read only where they fit together; what does not is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid.data.preparation.prepare import prepare
from hybrid.data.store import Store, train_tokens
from hybrid.data.tokenizer import Tokenizer
from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection

from .corpus import contents, digits_data, write_jsonl


@pytest.fixture
def prepared(tmp_path: Path) -> DataSection:
    data = digits_data(tmp_path, {"a": ["12", "345", "6789"]})
    prepare(data, processes=1)
    return data


def test_the_folder_must_fit_together(tmp_path: Path, python_tokenizer: Tokenizer) -> None:
    data = digits_data(tmp_path, {"a": ["12"]})
    with pytest.raises(DataError, match="no finished preparation"):
        Store(data)
    prepare(data)
    folder = tmp_path / "prepared"
    whole = contents(folder)

    def refused(match: str) -> None:
        with pytest.raises(DataError, match=match):
            Store(data)
        for name, content in whole.items():
            (folder / name).write_bytes(content)
        assert Store(data).vocab_size == 276

    python_tokenizer.save(folder / "tokenizer.model")
    refused("is not what the shards were made with")
    (folder / "a/00000-a.tokens").write_bytes(b"12")
    refused(r"00000-a\.tokens has 2 bytes, not 8")
    (folder / "a/00000-a.tokens").unlink()
    refused(r"00000-a\.tokens is missing")
    (folder / "a/00000-a.index.npy").write_bytes(b"")
    refused(r"index\.npy has other contents than were written")
    (folder / "a/00000-a.json").write_bytes(b"{")
    refused(r"00000-a\.json is damaged")
    info = json.loads(whole["a/00000-a.json"])
    (folder / "a/00000-a.json").write_text(json.dumps({**info, "tokenizer": "0" * 64}))
    refused("made with another tokenizer")
    data.sources["other"] = data.sources["a"]
    with pytest.raises(DataError, match=r"source 'other' is not in .* \(there: a\)"):
        Store(data)


def test_every_document_is_on_one_side_and_copies_on_the_same(tmp_path: Path) -> None:
    texts = [str(number) for number in range(200)]
    data = digits_data(tmp_path, {"a": texts, "b": texts[:100]}, validation=0.3)
    report = prepare(data)
    store = Store(data)
    tokenizer = store.tokenizer
    sides: dict[bool, set[str]] = {False: set(), True: set()}
    for source in store.sources.values():
        for document, held in enumerate(source.held_out):
            sides[bool(held)].add(tokenizer.decode(source.read(document).tolist()))
    assert sides[False] | sides[True] == set(texts)
    assert not sides[False] & sides[True]
    assert report.sources["a"].held_out == len(sides[True])
    assert 40 <= len(sides[True]) <= 80
    trained = [tokenizer.decode(ids.tolist()) for ids in train_tokens(data)]
    assert sorted(trained) == sorted([*sides[False], *(sides[False] & set(texts[:100]))])


@pytest.mark.parametrize("content", [b"{}", b"[]", b"null", b"[" * 100_000, b"\xff"])
@pytest.mark.parametrize("name", ["report.json", "a/00000-a.json", "tokenizer.json"])
def test_a_damaged_file_is_named_and_made_again_by_force(
    prepared: DataSection, name: str, content: bytes
) -> None:
    folder = Path(prepared.folder)
    before = contents(folder)
    (folder / name).write_bytes(content)
    use = (lambda data: prepare(data, processes=1)) if name == "tokenizer.json" else Store
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        use(prepared)
    prepare(prepared, processes=1, force=True)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["a/00000-a.tokens", "a/00000-a.index.npy"])
@pytest.mark.parametrize("size", [None, 0, 9])
def test_a_missing_or_cut_shard_is_named_and_made_again_by_force(
    prepared: DataSection, name: str, size: int | None
) -> None:
    folder = Path(prepared.folder)
    before = contents(folder)
    (folder / name).unlink()
    if size is not None:
        (folder / name).write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"{name} .*--force"):
        Store(prepared)
    prepare(prepared, processes=1, force=True)
    assert contents(folder) == before


def test_facts_that_contradict_each_other_are_refused(prepared: DataSection) -> None:
    path = Path(prepared.folder) / "report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, "vocab_size": 7}))
    with pytest.raises(DataError, match=r"vocab_size is 7, the model's 276"):
        Store(prepared)


def test_data_prepared_anew_are_read_anew(prepared: DataSection, tmp_path: Path) -> None:
    """In one process, the mapped file of the old shard is not what the new one gives."""
    old = [ids.tolist() for ids in train_tokens(prepared)]
    write_jsonl(tmp_path / "a.jsonl", ["21", "543", "9876"])
    prepare(prepared, processes=1, force=True)
    assert [ids[::-1] for ids in old] != old
    assert [[1, *ids[-2:0:-1], 2] for ids in old] == [ids.tolist() for ids in train_tokens(prepared)]
