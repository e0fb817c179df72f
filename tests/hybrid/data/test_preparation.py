from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hybrid.data import DataError, Store, Tokenizer, is_prepared, prepare, train_tokens
from hybrid.data.files import write_whole
from hybrid.data.sampling import BLOCK, training_sample
from hybrid.data.shards import Unit, content_hash, group, held_out
from hybrid.data.sources import Input, list_inputs
from hybrid.schema import DataSection, SourceSection

from .corpus import digits_data, stdlib_texts, write_jsonl


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but the empty lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def python_data(tmp_path: Path, model: Path, files: int = 12) -> DataSection:
    """Some Python in JSONL files of a quarter megabyte."""
    texts = stdlib_texts(60)
    (tmp_path / "text").mkdir()
    for number in range(files):
        random.Random(number).shuffle(texts)
        write_jsonl(tmp_path / "text" / f"{number:02d}.jsonl", texts[:4])
    source = SourceSection(paths=[str(tmp_path / "text")], validation=0.2)
    return DataSection(folder=str(tmp_path / "out"), sources={"py": source}, tokenizer=str(model))


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
    from hybrid.data.shards import token_dtype

    assert [token_dtype(size).str for size in (65536, 65537)] == ["<u2", "<u4"]


def test_several_processes_give_the_bytes_of_one_and_keep_finished_shards(
    tmp_path: Path, python_model: Path
) -> None:
    data = python_data(tmp_path, python_model, files=4)
    said: list[str] = []
    first = prepare(data, processes=1, say=said.append)
    assert (first.built, first.kept) == (4, 0)
    assert said[-1].startswith("4 of 4 shards to make, from ")
    alone = contents(tmp_path / "out")
    assert is_prepared(data)
    again = prepare(data, processes=2)
    assert (again.built, again.kept) == (0, 4)
    assert contents(tmp_path / "out") == alone
    shutil.rmtree(tmp_path / "out")
    assert not is_prepared(data)
    prepare(data, processes=2)
    assert contents(tmp_path / "out") == alone
    (tmp_path / "out/py/00002-02.json").unlink()  # as if stopped just before it was finished
    (tmp_path / "out/py/00009-09.tokens.partial").write_bytes(b"left over")
    assert not is_prepared(data)
    assert prepare(data).built == 1
    assert contents(tmp_path / "out") == alone


def test_a_preparation_of_four_processes_killed_half_way_ends_with_the_same_bytes(
    tmp_path: Path, python_model: Path
) -> None:
    """T053."""
    data = python_data(tmp_path, python_model, files=14)
    prepare(data, processes=1)
    uninterrupted = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    code = (
        "import sys; from hybrid.data import prepare; from hybrid.schema import DataSection, SourceSection\n"
        "text, out, model = sys.argv[1:]\n"
        "source = SourceSection(paths=[text], validation=0.2)\n"
        "prepare(DataSection(folder=out, sources={'py': source}, tokenizer=model), processes=4)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "text"), data.folder, str(python_model)]
    run = subprocess.Popen(command)

    def finished() -> int:
        return len(list((tmp_path / "out").glob("py/*.json")))

    wait_until(lambda: finished() >= 3 or run.poll() is not None)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert len(children) == 4
    wait_until(lambda: not any(alive(int(child)) for child in children))
    done = finished()
    assert 3 <= done < 14
    assert not (tmp_path / "out/report.json").exists()
    report = prepare(data, processes=4)
    assert (report.built, report.kept) == (14 - done, done)
    assert contents(tmp_path / "out") == uninterrupted


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_dies_is_an_error_not_a_hang(tmp_path: Path, python_model: Path) -> None:
    import threading

    data = python_data(tmp_path, python_model, files=12)
    pid = os.getpid()
    killed: list[int] = []

    def kill_one() -> None:
        def workers() -> list[int]:
            tasks = Path(f"/proc/{pid}/task").glob("*/children")
            found = [int(child) for task in tasks for child in task.read_text().split()]
            return [c for c in found if b"hybrid.data.worker" in Path(f"/proc/{c}/cmdline").read_bytes()]

        wait_until(lambda: len(workers()) > 0)
        killed.extend(workers()[:1])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(DataError, match=r"preparing py/.* failed: the process ended \(status -9\)"):
        prepare(data, processes=2)
    thread.join()
    assert killed
    assert not (tmp_path / "out/report.json").exists()
    assert prepare(data, processes=1).missing == []


def test_bad_lines_in_a_worker_are_reported_with_their_place(tmp_path: Path, python_model: Path) -> None:
    """T053."""
    data = python_data(tmp_path, python_model, files=3)
    with open(tmp_path / "text/01.jsonl", "a") as file:
        file.write('{"text": "a"} {"text": "b"}\n\n')
    with pytest.raises(DataError, match=r"01\.jsonl, line 5, column 15: more than one object on a line"):
        prepare(data, processes=2)
    assert not (tmp_path / "out/report.json").exists()
    data.sources["py"].bad_lines = "skip"
    report = prepare(data, processes=2)  # what was finished before is kept
    assert report.sources["py"].documents == 12
    assert report.sources["py"].skipped == {"blank line": 1, "more than one object on a line": 1}
    assert report.sources["py"].skipped_places == [
        f"{tmp_path}/text/01.jsonl, line 5, column 15: more than one object on a line",
        f"{tmp_path}/text/01.jsonl, line 6: blank line",
    ]
    data.sources["py"].bad_lines = "error"
    with pytest.raises(DataError, match="bad lines were skipped, now bad_lines is error"):
        prepare(data)


def test_parts_on_machines_that_share_the_folder(tmp_path: Path, python_model: Path) -> None:
    data = python_data(tmp_path, python_model, files=5)
    prepare(data, processes=1)
    whole = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    reports = []
    for part in (2, 3, 1):
        assert not is_prepared(data)
        reports.append(prepare(data, part=(part, 3), processes=1))
    assert [report.built for report in reports] == [2, 1, 2]
    assert reports[0].missing == ["py/00000-00", "py/00002-02", "py/00003-03"]
    assert reports[2].missing == []
    assert is_prepared(data)
    assert contents(tmp_path / "out") == whole
    with pytest.raises(DataError, match=r"part 4/3: must be i/n"):
        prepare(data, part=(4, 3))


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
    refused(r"index\.npy cannot be read")
    (folder / "a/00000-a.json").write_bytes(b"{")
    refused(r"00000-a\.json is damaged")
    info = json.loads(whole["a/00000-a.json"])
    (folder / "a/00000-a.json").write_text(json.dumps({**info, "tokenizer": "0" * 64}))
    refused("made with another tokenizer")
    data.sources["other"] = data.sources["a"]
    with pytest.raises(DataError, match=r"source 'other' is not in .* \(there: a\)"):
        Store(data)


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
    """T054."""
    (tmp_path / "a.txt").write_text("twenty lines of text\n" * 20)
    source = SourceSection(paths=[str(tmp_path / "a.txt")], validation=0)
    data = DataSection(folder=str(tmp_path / "out"), sources={"a": source}, vocab_size=8000)
    with pytest.raises(DataError, match=r"vocab_size is 8000, but the text allows at most \d+"):
        prepare(data)
    assert contents(tmp_path / "out") == {}


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


def test_a_sample_smaller_than_the_text_is_fixed_and_takes_blocks_of_long_documents(tmp_path: Path) -> None:
    texts = ["".join(random.Random(n).choices("abc ", k=BLOCK * 40)) for n in range(3)]
    total = sum(map(len, texts))
    sample = sample_of(tmp_path, texts, 0, budget=total // 4)
    assert sample == sample_of(tmp_path, texts, 0, budget=total // 4)
    assert total / 8 < sum(map(len, sample)) < total / 2
    assert {len(block) for block in sample} == {BLOCK}
    assert all(any(block in text for text in texts) for block in sample)


def test_small_files_share_a_shard() -> None:
    def text(size: int, number: int) -> Input:
        return Input(f"/x/{number}.txt", f"/x/{number}.txt", "text", size)

    half = 1 << 19
    inputs = [text(half, 0), text(half, 1), text(1, 2), text(2 << 20, 3), text(5, 4)]
    inputs.insert(4, Input("/x/z.jsonl", "/x/z.jsonl", "jsonl", 3))
    units = group("s", inputs)
    assert [(unit.name, len(unit.inputs)) for unit in units] == [
        ("00000-0", 2),
        ("00001-2", 1),
        ("00002-3", 1),
        ("00003-z", 1),
        ("00004-4", 1),
    ]
    assert [unit.size for unit in units] == [1 << 20, 1, 2 << 20, 3, 5]
    assert group("s", []) == []
    assert isinstance(units[0], Unit)


@pytest.fixture
def prepared(tmp_path: Path) -> DataSection:
    data = digits_data(tmp_path, {"a": ["12", "345", "6789"]})
    prepare(data, processes=1)
    return data


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


def test_a_share_below_one_never_takes_every_document() -> None:
    low = np.array([1, 2, 2], np.uint64)  # all hashes lie in the share
    assert held_out(low, 0.5).tolist() == [True, False, False]
    assert held_out(low[:1], 0.5).tolist() == [False]
    assert held_out(low, 1.0).tolist() == [True, True, True]


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed below)
    with full, pytest.raises(OSError, match="No space left on device") as caught, write_whole(tmp_path / "a"):
        full.write(b"x")
    assert caught.value.filename == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
