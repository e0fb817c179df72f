"""Finding, checking and leaving checkpoints; no training here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid.checkpoint import tensor_files
from hybrid.checkpoint.folder import CheckpointFolder, Origin, Progress, read_trainer, tags_in
from hybrid.checkpoint.run import load_weights, newest_weights, opened
from hybrid.checkpoint.writer import Writer
from hybrid.distributed.world import World
from hybrid.errors import TrainError
from hybrid.files import sha256

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


class Silent:
    """Notes what a run would say and log."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.values: dict[str, float] = {}

    def say(self, text: str) -> None:
        self.said.append(text)

    def write(self, step: int, values: dict[str, float]) -> None:
        self.values |= values


class FakeState:
    """A weight `a` of 4 elements and its moment of 250 000 bytes."""

    def files(self) -> list[tensor_files.TensorFile]:
        moment = tensor_files.Entry("a", "exp_avg", (250, 250), 0)
        return [tensor_files.layout({"a": (4,)}, [], "a")[0], tensor_files.TensorFile(OPTIMIZER, (moment,))]

    def capture(self) -> list[tuple[tensor_files.TensorFile, list[torch.Tensor]]]:
        return list(
            zip(self.files(), [[torch.arange(4.0)], [torch.ones(62000), torch.ones(500)]], strict=True)
        )


def checkpoints(folder: Path, keep_last: int = 3, copy: Path | None = None) -> CheckpointFolder:
    return CheckpointFolder(folder, keep_last, ALONE, copy)


def begin(kept: CheckpointFolder, step: int) -> tuple[Writer, Silent]:
    monitor = Silent()
    writer = Writer(kept, FakeState(), Origin(1, 1, "fp32", "f00"), ALONE, monitor)  # type: ignore[arg-type]
    writer.begin(Progress(step=step, sample=4 * step))
    return writer, monitor


def save(kept: CheckpointFolder, step: int) -> tuple[Writer, Silent]:
    writer, monitor = begin(kept, step)
    writer.wait()
    return writer, monitor


@pytest.fixture
def three(tmp_path: Path) -> CheckpointFolder:
    """Steps 10, 20 and 30."""
    kept = checkpoints(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        save(kept, step)
    return kept


def test_a_tag_holds_what_was_saved(three: CheckpointFolder):
    assert tags_in(three.path) == ["step_00000010", "step_00000020", "step_00000030"]
    assert (three.path / "latest").read_text() == "step_00000030\n"
    assert three.find("auto") == "step_00000030"
    progress, origin = read_trainer(three.path / "step_00000020")
    assert (progress.step, progress.sample, origin.tokenizer) == (20, 80, "f00")
    folder = newest_weights(three.path.parent)
    assert load_weights(folder)["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert load_file(folder / OPTIMIZER)["a.exp_avg"].equal(torch.ones(250, 250))


def test_empty_files_after_a_power_cut_are_passed_over(
    three: CheckpointFolder, capsys: pytest.CaptureFixture[str]
):
    """tdrussell/diffusion-pipe#159: all files of the newest have 0 bytes, and there is no `latest`."""
    for path in (three.path / "step_00000030").iterdir():
        path.write_bytes(b"")
    (three.path / "latest").unlink()
    assert three.find("auto") == "step_00000020"
    said = capsys.readouterr().out
    assert "step_00000030 is damaged (manifest.json is unreadable): going back to step_00000020" in said
    assert newest_weights(three.path.parent).name == "step_00000020"


def test_one_missing_shard_is_found_whatever_latest_says(
    three: CheckpointFolder, capsys: pytest.CaptureFixture[str]
):
    """pytorch/torchtitan#4191: 'latest' is padded with rubbish and one optimizer file is missing."""
    (three.path / "latest").write_bytes(b"step_30\n\0")
    (three.path / "step_00000030" / OPTIMIZER).unlink()
    assert three.find("auto") == "step_00000020"
    assert "optimizer.safetensors is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:999]), "has 999 bytes instead of 250"),
        (lambda path: path.write_bytes(b"\0" * path.stat().st_size), "has other contents than were written"),
    ],
)
def test_a_shortened_or_changed_file_is_found(three: CheckpointFolder, damage, words: str):
    damage(three.path / "step_00000030" / OPTIMIZER)
    assert three.find("auto") == "step_00000020"
    with pytest.raises(TrainError, match=words):
        three.find("step_00000030")


def test_when_all_are_damaged_it_stops(three: CheckpointFolder):
    """Never a silent fresh start."""
    for tag in tags_in(three.path):
        (three.path / tag / "model.safetensors").unlink()
    with pytest.raises(TrainError, match=r"no checkpoint .* is whole: step_00000030 .* step_00000010"):
        three.find("auto")
    with pytest.raises(TrainError, match=r"holds no whole weights: step_00000030 is damaged .*missing"):
        newest_weights(three.path.parent)


def test_an_absent_tag_stops_and_says_what_there_is(three: CheckpointFolder):
    with pytest.raises(TrainError, match=r"no checkpoint 'step_00000015' .* step_00000010, step_00000020"):
        three.find("step_00000015")


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path):
    assert checkpoints(tmp_path / "none").find("auto") is None
    (tmp_path / "some").mkdir()
    assert checkpoints(tmp_path / "some").find("auto") is None


def test_never_refuses_a_folder_with_checkpoints(three: CheckpointFolder, tmp_path: Path):
    with pytest.raises(TrainError, match="already holds checkpoints"):
        three.find("never")
    assert checkpoints(tmp_path / "none").find("never") is None


def test_an_unfinished_save_is_not_a_checkpoint(three: CheckpointFolder):
    (three.path / "step_00000030").rename(three.path / "step_00000030.partial")
    assert three.find("auto") == "step_00000020"
    save(three, 40)
    assert not (three.path / "step_00000030.partial").exists()


def test_only_the_newest_are_kept(tmp_path: Path):
    kept = checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        save(kept, step)
        assert kept.find("auto") == f"step_{step:08d}"
    assert tags_in(tmp_path) == ["step_00000003", "step_00000004"]


def test_going_back_sets_newer_tags_aside_until_training_has_passed_them(three: CheckpointFolder):
    three.set_newer_aside(10)
    assert tags_in(three.path) == ["step_00000010"]
    save(three, 20)
    names = {path.name for path in three.path.iterdir()}
    assert names == {"latest", "step_00000010", "step_00000020", "step_00000030.aside"}
    save(three, 30)
    assert not list(three.path.glob("*.aside"))


def test_a_full_disk_leaves_the_older_tags_as_they_were(
    three: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
):
    """Training is not told by an exception, but by words and a number."""
    true_write = tensor_files.write

    def write(path: Path, *rest: Any) -> tuple[int, str]:
        true_write(path, *rest)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tensor_files, "write", write)
    writer, monitor = save(three, 40)
    assert re.search(
        r"step_00000040: No space left .*; the newest good checkpoint is step_00000030; training goes on",
        monitor.said[0],
    )
    assert (writer.saved_step, writer.begun_step, monitor.values["checkpoint/failures"]) == (-1, 40, 1)
    assert not list(three.path.glob("*40*"))
    assert three.find("auto") == "step_00000030"
    monkeypatch.undo()
    assert save(three, 50)[0].saved_step == 50


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    _, monitor = save(checkpoints(tmp_path / "checkpoints"), 10)
    assert re.search(r"could not write checkpoint .*step_00000010.* no earlier checkpoint", monitor.said[0])


def test_training_goes_on_while_a_slow_disk_is_written(
    three: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
):
    """The next save waits for a while, then it is left out; the one on its way is not harmed."""
    release, true_write = threading.Event(), tensor_files.write

    def write(*args: Any) -> tuple[int, str]:
        release.wait(30)
        return true_write(*args)

    monkeypatch.setattr(tensor_files, "write", write)
    monkeypatch.setattr("hybrid.checkpoint.writer.SAVE_TIMEOUT", 0.05)
    writer, monitor = begin(three, 40)
    writer.advance()
    assert monitor.values["checkpoint/stall_seconds"] < 1
    assert tags_in(three.path)[-1] == "step_00000030"
    writer.begin(Progress(step=50))
    assert "step 50 is left out: that of step 40 is still being written" in monitor.said[0]
    release.set()
    writer.wait()
    assert (writer.saved_step, tags_in(three.path)[-1]) == (40, "step_00000040")


def test_a_copy_is_kept_in_a_second_folder(tmp_path: Path):
    kept = checkpoints(tmp_path / "a", keep_last=2, copy=tmp_path / "b")
    for step in (1, 2, 3):
        save(kept, step)
    assert tags_in(tmp_path / "b") == ["step_00000002", "step_00000003"]
    for path in (tmp_path / "a" / "step_00000003").iterdir():
        assert (tmp_path / "b" / "step_00000003" / path.name).read_bytes() == path.read_bytes()
    shutil.rmtree(tmp_path / "a")
    for resume in ("auto", "never"):
        with pytest.raises(TrainError, match=r"no checkpoint in .*a\. .*b has copies \(step_00000002, "):
            kept.find(resume)
    shutil.copytree(tmp_path / "b", tmp_path / "a")
    assert kept.find("auto") == "step_00000003"


def test_a_copy_that_fails_costs_nothing_else(tmp_path: Path):
    (tmp_path / "b").write_text("a file where the folder should be")
    writer, monitor = save(checkpoints(tmp_path / "a", copy=tmp_path / "b"), 1)
    assert writer.saved_step == 1
    assert "could not copy checkpoint step_00000001" in monitor.said[0]


@pytest.mark.parametrize("second", [False, True])
def test_an_old_tag_that_cannot_be_deleted_is_said_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: bool
):
    """The save stands, in both folders, and so does the run: the other old tags go all the same."""
    kept = checkpoints(tmp_path / "a", keep_last=1, copy=tmp_path / "b")
    save(kept, 1)
    stuck = tmp_path / ("b" if second else "a") / "step_00000001"
    true_rmtree = shutil.rmtree

    def rmtree(path: Path, *arguments: Any, **options: Any) -> None:
        if path == stuck:
            raise PermissionError(13, "Permission denied", str(path))
        true_rmtree(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    writer, monitor = save(kept, 2)
    assert (writer.saved_step, writer.failure) == (2, "")
    assert "checkpoint/failures" not in monitor.values
    assert len(monitor.said) == 1
    assert f"could not delete the old checkpoint {stuck}: " in monitor.said[0]
    assert kept.find("auto") == "step_00000002"
    both = ["step_00000001", "step_00000002"]
    assert (tags_in(kept.path), tags_in(tmp_path / "b")) == ((both[1:], both) if second else (both, both[1:]))


def test_a_leftover_that_cannot_be_deleted_is_no_failure(tmp_path: Path):
    kept = checkpoints(tmp_path)
    (tmp_path / "step_00000001.partial").write_text("no folder, as rmtree needs one")
    writer, monitor = save(kept, 2)
    assert (writer.saved_step, monitor.said) == (2, [])


def test_links_laid_where_a_save_will_write_are_not_followed(tmp_path: Path):
    """In a folder that others can write; leftovers of killed saves go, files of others stay."""
    theirs, folder = tmp_path / "theirs", tmp_path / "checkpoints"
    theirs.mkdir()
    folder.mkdir()
    (theirs / WEIGHTS).write_text("kept")
    (folder / "step_00000002.partial").symlink_to(theirs)
    (folder / "latest").symlink_to(theirs / WEIGHTS)
    (folder / ".latest.0123abcd.partial").write_text("of a killed save")
    (folder / "other.partial").write_text("kept")
    writer, monitor = save(checkpoints(folder), 2)
    assert (writer.saved_step, monitor.said) == (2, [])
    assert {path.name for path in folder.iterdir()} == {"latest", "step_00000002", "other.partial"}
    assert (theirs / WEIGHTS).read_text() == "kept"
    assert (folder / "latest").read_text() == "step_00000002\n"


def test_files_beyond_a_size_are_cut_at_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As other programs cut them: numbered, with an index of the weights."""
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 32)
    files = tensor_files.layout({"a": (4,), "b": (3,), "c": (2, 3)}, ["exp_avg", "step"], "abc")
    assert [[entry.name for entry in file.entries] for file in files] == [
        ["a", "b"], ["c"], ["a.exp_avg", "a.step", "b.exp_avg"], ["b.step", "c.exp_avg", "c.step"],
    ]  # fmt: skip
    for number, file in enumerate(files):
        numbers = torch.arange(file.elements, dtype=torch.float32) + 100 * number
        tensor_files.write(tmp_path / file.name, file.header(), [numbers], lambda: None)
    index = tensor_files.index(files)
    assert index is not None
    assert index["weight_map"] == {name: files[name == "c"].name for name in "abc"}
    assert [path.name for path in sorted(tmp_path.glob("m*"))] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    found = load_weights(newest_weights(tmp_path))
    assert found["c"].tolist() == [[100.0, 101.0, 102.0], [103.0, 104.0, 105.0]]
    reader = tensor_files.Reader(tmp_path)
    assert reader.keys == ["exp_avg", "step"]
    assert (reader.state("b", "step").item(), reader.state("b", "exp_avg").tolist()) == (300, [205, 206, 207])
    with pytest.raises(TrainError, match=r"holds no d\.exp_avg"):
        reader.state("d", "exp_avg")


def test_weights_lie_in_a_folder_of_their_own_too(three: CheckpointFolder, tmp_path: Path):
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(newest_weights(three.path.parent) / WEIGHTS, alone)
    assert newest_weights(alone) == alone


def test_the_manifest_lists_every_other_file(three: CheckpointFolder):
    folder = three.path / "step_00000010"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {"manifest.json"}


@pytest.mark.parametrize(
    "manifest",
    ["[]", "null", '{"files": []}', '{"files": {}}', '{"files": {"trainer.json": {}}}', "[" * 100_000],
)
def test_a_manifest_that_says_nothing_is_damage(
    three: CheckpointFolder, capsys: pytest.CaptureFixture[str], manifest: str
):
    """Nothing would have been checked; reading weights falls back too, and says so."""
    (three.path / "step_00000030" / "manifest.json").write_text(manifest)
    assert three.find("auto") == "step_00000020"
    assert "step_00000030 is damaged (manifest.json" in capsys.readouterr().out
    assert newest_weights(three.path.parent).name == "step_00000020"
    assert "step_00000030 is damaged (manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_damaged_record_goes_back_to_an_older_tag(
    three: CheckpointFolder, capsys: pytest.CaptureFixture[str], damage: bytes | None
):
    """To train on, and to read the weights, whose tokenizer it names."""
    path = three.path / "step_00000030" / "trainer.json"
    path.unlink() if damage is None else path.write_bytes(damage)
    assert newest_weights(three.path.parent).name == "step_00000020"
    assert "step_00000030 is damaged (trainer.json" in capsys.readouterr().err
    assert three.find("auto") == "step_00000020"
    assert "step_00000030 is damaged (trainer.json" in capsys.readouterr().out


def reseal(tag: Path, name: str = "trainer.json") -> None:
    """Make the manifest agree with a file that was changed."""
    manifest = json.loads((tag / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": (tag / name).stat().st_size, "sha256": sha256(tag / name)}
    (tag / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "trainer.json is damaged, or of another version"),
        ('{"progress": {"stride": 1}, "origin": {}}', "trainer.json is damaged, or of another version"),
        (None, "trainer.json is of step 20"),
    ],
)
def test_a_record_that_is_as_written_but_no_record_goes_back_too(
    three: CheckpointFolder, capsys: pytest.CaptureFixture[str], record: str | None, words: str
):
    """None: an older tag's files under the newest one's name."""
    newest = three.path / "step_00000030"
    if record is None:
        shutil.rmtree(newest)
        shutil.copytree(three.path / "step_00000020", newest)
    else:
        (newest / "trainer.json").write_text(record)
        reseal(newest)
    assert newest_weights(three.path.parent).name == "step_00000020"
    assert words in capsys.readouterr().err
    assert three.find("auto") == "step_00000020"
    assert words in capsys.readouterr().out
    with pytest.raises(TrainError, match=words):
        three.find("step_00000030")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "optimizer-1.safetensors"])
def test_tensors_that_no_manifest_lists_are_not_read(three: CheckpointFolder, name: str):
    shutil.copy(three.path / "step_00000010" / WEIGHTS, three.path / "step_00000030" / name)
    assert three.find("auto") == "step_00000020"
    assert newest_weights(three.path.parent).name == "step_00000020"


def test_weights_laid_beside_checkpoints_are_not_taken_for_theirs(three: CheckpointFolder):
    shutil.copy(three.path / "step_00000010" / WEIGHTS, three.path.parent)
    (three.path / "latest").write_text("../../elsewhere\n")
    assert newest_weights(three.path.parent).name == "step_00000030"


def test_changed_weights_are_not_taken(three: CheckpointFolder, capsys: pytest.CaptureFixture[str]):
    path = three.path / "step_00000030" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert newest_weights(three.path.parent).name == "step_00000020"
    assert "model.safetensors has other contents than were written): taking step_00000020" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000])
def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TrainError, match=r"model\.safetensors is damaged or no safetensors file"):
        load_weights(newest_weights(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[]", '{"progress": {"stride": 1}, "origin": {}}'])
def test_a_record_of_another_version_is_refused(three: CheckpointFolder, content: str):
    (three.path / "step_00000030" / "trainer.json").write_text(content)
    with pytest.raises(TrainError, match=r"trainer\.json is damaged, or of another version"):
        read_trainer(three.path / "step_00000030")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_without_locks_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with opened(tmp_path / "run"):
        pass
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run' / 'lock'} cannot be locked ({os.strerror(number)}): going on" in said


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("elsewhere", path)])
def test_a_lock_that_is_no_file_is_named(tmp_path: Path, make: Any):
    make(tmp_path / "lock")
    with pytest.raises(TrainError, match=r"lock cannot be opened to lock .*: remove it"), opened(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_within_a_run_is_not_taken_for_one_of_its_lock(tmp_path: Path):
    with pytest.raises(BlockingIOError), opened(tmp_path):
        raise BlockingIOError
