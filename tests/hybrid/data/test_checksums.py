"""Prepared data, and the files they were made from, that changed on disk: found by content, not by size."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from hybrid.data.checksums import ShardCheck, check_prepared
from hybrid.data.preparation import shards
from hybrid.data.preparation.prepare import outdated, prepare
from hybrid.data.store import Store, train_tokens
from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection

from .corpus import contents, digits_data, python_data, write_jsonl


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    found = digits_data(tmp_path, {"a": ["12", "345", "6789"], "b": ["55", "66"]})
    prepare(found, processes=1)
    return found


def flip(path: Path, at: int = -3) -> None:
    """Change one byte to another that is as legal."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def first_fault(data: DataSection) -> str | None:
    """What a run finds that trains on the data."""
    try:
        check = ShardCheck([file for source in Store(data).sources.values() for file in source.files])
    except DataError as error:
        return str(error)
    assert check.over(None)
    return check.fault and str(check.fault)


def without_checksums(folder: Path) -> None:
    """Make the folder one that an earlier version prepared."""
    for path in [*folder.glob("*/*.json"), folder / "report.json"]:
        info = json.loads(path.read_text())
        for key in ("tokens_sha256", "index_sha256"):
            info.pop(key, None)
        for file in info.get("files", ()):
            del file["status_changed"]
        for source in info.get("sources", {}).values():
            del source["fingerprint"]
        path.write_text(json.dumps(info))


def test_a_changed_byte_of_a_shard_is_named_and_force_makes_that_shard_again(data: DataSection) -> None:
    folder = Path(data.folder)
    whole = contents(folder)
    assert first_fault(data) is None
    assert check_prepared(data) == f"{folder}: 2 shards are as they were written"
    for name in ("a/00000-a.tokens", "b/00000-b.tokens"):
        flip(folder / name, at=2)
    assert "a/00000-a.tokens has other contents than were written" in str(first_fault(data))
    with pytest.raises(
        DataError, match=r"2 of 2 shards are damaged\n.*00000-a\.tokens .*\n.*00000-b\.tokens "
    ):
        check_prepared(data)
    assert prepare(data, processes=1, force=True).built == 2
    assert contents(folder) == whole
    flip(folder / "b/00000-b.tokens", at=2)
    assert prepare(data, processes=1, force=True).built == 1
    assert contents(folder) == whole


@pytest.mark.parametrize("column", [0, 1, 2])
def test_an_index_whose_sums_still_fit_is_not_believed(data: DataSection, column: int) -> None:
    """A moved border, other counts of bytes, another hash and so another side of the split."""
    path = Path(data.folder, "a/00000-a.index.npy")
    index = np.load(path)
    index[:2, column] = index[1::-1, column]
    np.save(path, index)
    assert "00000-a.index.npy has other contents than were written" in str(first_fault(data))
    with pytest.raises(DataError, match=r"1 of 2 shards are damaged\n.*00000-a\.index\.npy"):
        check_prepared(data)


def test_shards_that_took_each_others_names_are_refused(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["12", "34"]})
    data.sources["a"].paths.append(str(write_jsonl(tmp_path / "z.jsonl", ["56", "78"])))
    prepare(data, processes=1)
    folder = Path(data.folder, "a")
    for suffix in (".json", ".index.npy", ".tokens"):
        one, other = folder / f"00000-a{suffix}", folder / f"00001-z{suffix}"
        kept = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(kept)
    with pytest.raises(DataError, match=r"report\.json is damaged .*source 'a'"):
        check_prepared(data)


def test_data_of_an_earlier_version_are_read_and_said_to_have_no_checksums(data: DataSection) -> None:
    without_checksums(Path(data.folder))
    assert first_fault(data) is None
    assert "; 2 have no checksums, as an earlier version made them" in check_prepared(data)
    assert outdated(data) is None
    assert prepare(data, processes=1).built == 0


def test_a_shard_that_is_replaced_while_a_run_reads_it_stops_the_run(data: DataSection) -> None:
    source = Store(data).sources["a"]
    path = Path(source.files[0].path)
    os.utime(path, (1, 1))  # touched, but the same
    assert source.read(0).tolist()[0] == 1
    source = Store(data).sources["a"]
    path.unlink()
    path.write_bytes(bytes(2 * int(source.tokens.sum())))
    with pytest.raises(DataError, match=r"00000-a\.tokens was replaced while it was read"):
        source.read(0)


def test_a_source_that_changed_and_kept_its_size_is_found(data: DataSection, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.utime(path, (1, 1))
    assert outdated(data) is None
    (tmp_path / "copy").write_bytes(before)
    os.replace(tmp_path / "copy", path)
    assert outdated(data) is None
    assert prepare(data, processes=1).built == 0
    path.write_bytes(before.replace(b"345", b"543"))
    os.utime(path, ns=times)  # as rsync and tar set it
    expected = f"{path} changed since it was prepared (of {len(before)} bytes then and now)"
    assert outdated(data) == expected
    with pytest.raises(DataError, match=r"a\.jsonl changed since it was prepared (.|\n)*--force"):
        prepare(data, processes=1)
    assert [ids.tolist() for ids in train_tokens(data)]  # the shards stand as they are
    assert prepare(data, processes=1, force=True).built == 1


def test_a_large_source_is_sampled_at_a_launch_and_read_whole_by_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SAMPLED", 20)
    data = digits_data(tmp_path, {"a": ["1" * 100, "2" * 100]})
    prepare(data, processes=1)
    path = tmp_path / "a.jsonl"
    size = path.stat().st_size
    assert size > 3 * shards.SAMPLED
    for at in (19, size // 2, size - 20):
        content = path.read_bytes()
        flip(path, at)
        assert "a.jsonl changed since" in str(outdated(data))
        path.write_bytes(content)
        assert outdated(data) is None
    flip(path, 40)  # between the samples
    assert outdated(data) is None
    with pytest.raises(DataError, match=r"a\.jsonl changed since"):
        prepare(data, processes=1)


def test_the_fingerprint_is_of_the_documents_wherever_they_lie(tmp_path: Path) -> None:
    texts = ["12", "345", "6789"]

    def described(folder: str, *files: list[str], **source: float) -> dict[str, object]:
        (tmp_path / folder).mkdir()
        data = digits_data(tmp_path / folder, {"a": files[0]}, validation=source.pop("validation", 0.0))
        more = [write_jsonl(tmp_path / folder / f"z{n}.jsonl", each) for n, each in enumerate(files[1:])]
        data.sources["a"].paths += map(str, more)
        data.sources["a"].weight = source.pop("weight", 1.0)
        prepare(data, processes=1)
        return Store(data).describe()["a"]

    one = described("one", texts)
    assert described("moved", texts) == one
    assert described("in two files", texts[:2], texts[2:]) == one
    assert described("in another order", texts[::-1])["fingerprint"] != one["fingerprint"]
    assert described("other", ["12", "345", "6798"])["fingerprint"] != one["fingerprint"]
    held = described("held out", texts, validation=0.5)
    assert {key for key in one if held[key] != one[key]} == {"held_out", "held_out_fingerprint"}
    assert described("heavy", texts, weight=2.0) == {**one, "weight": 2.0}


def test_a_worker_that_cannot_write_says_which_file_in_a_line(tmp_path: Path, python_model: Path) -> None:
    """As on a full disk: here files may be only so long."""
    data = python_data(tmp_path, python_model, files=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (python_model.stat().st_size + 1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"out/py/0000\d-\S+\.tokens") as caught:
            prepare(data, processes=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert prepare(data, processes=2).missing == []
