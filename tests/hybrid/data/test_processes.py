"""Several processes prepare as one does; some of them die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid.data.preparation.prepare import is_prepared, prepare
from hybrid.errors import DataError

from .corpus import contents, python_data


def test_several_processes_give_the_bytes_of_one_and_keep_finished_shards(
    tmp_path: Path, python_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hybrid").mkdir()  # as beside a clone: not the package
    (tmp_path / "hybrid/__init__.py").write_text("raise SystemExit('the wrong package')")
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
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


def test_a_preparation_stopped_and_killed_half_way_ends_with_the_same_bytes(
    tmp_path: Path, python_model: Path
) -> None:
    """deepseek-ai/DeepSpec#29: a resumed preparation skipped the wrong rows."""
    data = python_data(tmp_path, python_model, files=14)
    prepare(data, processes=1)
    uninterrupted = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    script = tmp_path / "script.py"  # whose lines no worker may run
    script.write_text(
        "import signal\n"
        "from hybrid.data.preparation.prepare import prepare\n"
        "from hybrid.recipe.schema import DataSection, SourceSection\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"source = SourceSection(paths=[{str(tmp_path / 'text')!r}], validation=0.2)\n"
        f"data = DataSection({data.folder!r}, {{'py': source}}, tokenizer={str(python_model)!r})\n"
        "prepare(data, processes=4)\n"
    )

    def finished() -> int:
        return len(list((tmp_path / "out").glob("py/*.json")))

    for number in (signal.SIGINT, signal.SIGKILL):
        before = finished()
        run = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
        wait_until(lambda run=run, before=before: finished() >= before + 2 or run.poll() is not None)
        workers = spawned(run.pid)
        run.send_signal(number)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == -number
        assert errors.endswith("KeyboardInterrupt\n" if number == signal.SIGINT else "")
        assert "resource_tracker" not in errors
        assert len(workers) == 4
        wait_until(lambda workers=workers: not any(alive(worker) for worker in workers))
    done = finished()
    assert 4 <= done < 14
    assert not (tmp_path / "out/report.json").exists()
    report = prepare(data, processes=4)
    assert (report.built, report.kept) == (14 - done, done)
    assert contents(tmp_path / "out") == uninterrupted


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def spawned(pid: int) -> list[int]:
    """The worker processes of a preparation."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [one for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_that_dies_is_an_error_not_a_hang(tmp_path: Path, python_model: Path) -> None:
    import threading

    data = python_data(tmp_path, python_model, files=12)
    pid = os.getpid()
    others = set(spawned(pid))  # such as ranks that other tests keep
    killed: list[int] = []

    def kill_one() -> None:
        wait_until(lambda: bool(set(spawned(pid)) - others))
        killed.append(min(set(spawned(pid)) - others))
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(DataError, match=r"preparing py/\S+, py/\S+ failed: the process ended \(killed"):
        prepare(data, processes=2)
    thread.join()
    assert killed
    assert not (tmp_path / "out/report.json").exists()
    assert prepare(data, processes=1).missing == []


def test_bad_lines_in_a_worker_are_reported_with_their_place(tmp_path: Path, python_model: Path) -> None:
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
