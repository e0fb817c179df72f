"""What a preparation refuses, and what it makes again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hybrid.data.preparation.prepare import is_prepared, prepare
from hybrid.data.store import Store
from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection, SourceSection

from .corpus import contents, digits_data, stdlib_texts, write_jsonl


def test_a_changed_file_is_refused_and_rebuilt_with_force(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["12", "34"], "b": ["5"]})
    prepare(data)
    before = contents(tmp_path / "prepared")
    path = tmp_path / "a.jsonl"
    os.utime(path, (1, 1))  # touched, but the same
    assert prepare(data).built == 0
    write_jsonl(path, ["12", "35"])  # another content of the same size
    with pytest.raises(DataError, match=r"other sources or settings:\n  .*a\.jsonl changed (.|\n)*--force"):
        prepare(data)
    assert contents(tmp_path / "prepared") == before
    report = prepare(data, force=True)
    assert (report.built, report.kept) == (1, 1)
    write_jsonl(path, ["1"])
    with pytest.raises(DataError, match=r"a\.jsonl changed .* \(\d+ bytes then, \d+ now\)"):
        prepare(data)


def test_added_and_removed_files_are_noticed(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["12"], "b": ["5"]})
    prepare(data)
    gone = data.sources.pop("b")
    assert not is_prepared(data)
    with pytest.raises(DataError, match=r"b/00000-b\.json belongs to no source any more"):
        prepare(data)
    assert prepare(data, force=True).kept == 1
    assert sorted(path.name for path in (tmp_path / "prepared").glob("*/*")) == [
        "00000-a.index.npy",
        "00000-a.json",
        "00000-a.tokens",
    ]
    data.sources["b"] = gone
    assert prepare(data).built == 1


def test_changed_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for number, text in enumerate(stdlib_texts(4)):
        (tmp_path / "t" / f"{number}.py").write_text(text)
    data = DataSection(
        folder=str(tmp_path / "out"),
        sources={"t": SourceSection(paths=[str(tmp_path / "t")])},
        vocab_size=600,
    )
    prepare(data)
    data.context, data.boundaries, data.sources["t"].weight = 17, "cross", 3.0  # the loader's business
    assert is_prepared(data)
    data.vocab_size = 700
    assert not is_prepared(data)
    with pytest.raises(DataError, match="tokenizer: vocab_size was 600, is now 700"):
        prepare(data)
    assert prepare(data, force=True).vocab_size == 700
    assert is_prepared(data)
    assert Store(data).vocab_size == 700


def test_another_tokenizer_is_refused(tmp_path: Path, python_model: Path) -> None:
    data = digits_data(tmp_path, {"a": ["12"]})
    prepare(data)
    data.tokenizer = str(python_model)
    with pytest.raises(DataError, match=r"tokenizer: given was '[0-9a-f]{64}', is now '[0-9a-f]{64}'"):
        prepare(data)
    prepare(data, force=True)
    assert Store(data).vocab_size == 1000


def test_sources_without_documents_and_without_files_are_refused(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": [""]})
    with pytest.raises(DataError, match=r"source a holds no document \(1 x empty document\)"):
        prepare(data)
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        prepare(DataSection(folder=str(tmp_path / "x"), sources={}))
    data.sources["a"].paths = [str(tmp_path)]
    data.sources["a"].format = "text"
    with pytest.raises(DataError, match=r"inside data\.folder"):
        prepare(data)


def test_too_large_a_vocabulary_leaves_nothing_half_made(tmp_path: Path) -> None:
    """google/sentencepiece#4, #727."""
    (tmp_path / "a.txt").write_text("twenty lines of text\n" * 20)
    source = SourceSection(paths=[str(tmp_path / "a.txt")], validation=0)
    data = DataSection(folder=str(tmp_path / "out"), sources={"a": source}, vocab_size=8000)
    with pytest.raises(DataError, match=r"vocab_size is 8000, but the text allows at most \d+"):
        prepare(data)
    assert contents(tmp_path / "out") == {}


def test_a_file_system_without_locks_is_told_and_prepared_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("hybrid.files.fcntl.flock", no_locks)
    said: list[str] = []
    assert prepare(digits_data(tmp_path, {"a": ["12", "34"]}), say=said.append).missing == []
    assert ".lock-1-of-1 cannot be locked (Function not implemented): going on without" in said[0]


def test_a_lock_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["12"]})
    Path(data.folder).mkdir()
    os.mkfifo(Path(data.folder) / ".lock-1-of-1")
    with pytest.raises(DataError, match=r"\.lock-1-of-1 cannot be opened to lock .* \(not a plain file\)"):
        prepare(data)
