"""Finding, checking and leaving checkpoints; no training here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid.train.checkpoint import Checkpoints, Origin, Progress, load_weights, newest_weights, tags_in
from hybrid.train.distributed import TrainError, World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


class FakeEngine:
    """Writes the files of two ranks; `failure` is raised as a full disk would."""

    def __init__(self, failure: OSError | None = None) -> None:
        self.failure = failure

    def save(self, folder: str, tag: str) -> None:
        if self.failure:
            raise self.failure
        for rank in range(2):
            Path(folder, tag, f"zero_pp_rank_{rank}_optim_states.pt").write_bytes(bytes([rank]) * 1000)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"a": torch.arange(4.0)}


def checkpoints(folder: Path, keep_last: int = 3) -> Checkpoints:
    return Checkpoints(folder, keep_last, ALONE)


def save(kept: Checkpoints, step: int, engine: FakeEngine | None = None) -> Path:
    return kept.save(
        engine or FakeEngine(), Progress(step=step, sample=4 * step), Origin(1, 1, "fp32", "f00")
    )


@pytest.fixture
def three(tmp_path: Path) -> Checkpoints:
    """Steps 10, 20 and 30."""
    kept = checkpoints(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        save(kept, step)
    return kept


def test_a_tag_holds_what_was_saved(three: Checkpoints):
    assert tags_in(three.folder) == ["step_00000010", "step_00000020", "step_00000030"]
    assert (three.folder / "latest").read_text() == "step_00000030\n"
    assert three.find("auto") == "step_00000030"
    progress, origin = three.read("step_00000020")
    assert (progress.step, progress.sample, origin.tokenizer) == (20, 80, "f00")
    weights = load_file(newest_weights(three.folder.parent))
    assert weights["a"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_empty_files_after_a_power_cut_are_passed_over(
    three: Checkpoints, capsys: pytest.CaptureFixture[str]
):
    """T007: all files of the newest have 0 bytes, and there is no `latest`."""
    for path in (three.folder / "step_00000030").iterdir():
        path.write_bytes(b"")
    (three.folder / "latest").unlink()
    assert three.find("auto") == "step_00000020"
    said = capsys.readouterr().out
    assert "step_00000030 is damaged (manifest.json is unreadable): going back to step_00000020" in said
    assert newest_weights(three.folder.parent).parent.name == "step_00000020"


def test_one_missing_shard_is_found_whatever_latest_says(
    three: Checkpoints, capsys: pytest.CaptureFixture[str]
):
    """T007: 'latest' is padded with rubbish and one rank's optimizer file is missing."""
    (three.folder / "latest").write_bytes(b"step_30\n\0")
    (three.folder / "step_00000030" / "zero_pp_rank_1_optim_states.pt").unlink()
    assert three.find("auto") == "step_00000020"
    assert "zero_pp_rank_1_optim_states.pt is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"\1" * 999), "has 999 bytes instead of 1000"),
        (lambda path: path.write_bytes(b"\0" * 1000), "has other contents than were written"),
    ],
)
def test_a_shortened_or_changed_file_is_found(three: Checkpoints, damage, words: str):
    damage(three.folder / "step_00000030" / "zero_pp_rank_1_optim_states.pt")
    assert three.find("auto") == "step_00000020"
    with pytest.raises(TrainError, match=words):
        three.find("step_00000030")


def test_when_all_are_damaged_it_stops(three: Checkpoints):
    """Never a silent fresh start."""
    for tag in tags_in(three.folder):
        (three.folder / tag / "model.safetensors").unlink()
    with pytest.raises(TrainError, match=r"no checkpoint .* is whole: step_00000030 .* step_00000010"):
        three.find("auto")
    with pytest.raises(TrainError, match=r"holds no whole weights: step_00000030 is damaged .*missing"):
        newest_weights(three.folder.parent)


def test_an_absent_tag_stops_and_says_what_there_is(three: Checkpoints):
    with pytest.raises(TrainError, match=r"no checkpoint 'step_00000015' .* step_00000010, step_00000020"):
        three.find("step_00000015")


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path):
    assert checkpoints(tmp_path / "none").find("auto") is None
    (tmp_path / "some").mkdir()
    assert checkpoints(tmp_path / "some").find("auto") is None


def test_never_refuses_a_folder_with_checkpoints(three: Checkpoints, tmp_path: Path):
    with pytest.raises(TrainError, match="already holds checkpoints"):
        three.find("never")
    assert checkpoints(tmp_path / "none").find("never") is None


def test_an_unfinished_save_is_not_a_checkpoint(three: Checkpoints):
    (three.folder / "step_00000030").rename(three.folder / "step_00000030.partial")
    assert three.find("auto") == "step_00000020"
    save(three, 40)
    assert not (three.folder / "step_00000030.partial").exists()


def test_only_the_newest_are_kept(tmp_path: Path):
    kept = checkpoints(tmp_path, keep_last=2)
    for step in (1, 2, 3, 4):
        save(kept, step)
        assert kept.find("auto") == f"step_{step:08d}"
    assert tags_in(tmp_path) == ["step_00000003", "step_00000004"]


def test_going_back_sets_newer_tags_aside_until_training_has_passed_them(three: Checkpoints):
    three.set_newer_aside(10)
    assert tags_in(three.folder) == ["step_00000010"]
    save(three, 20)
    names = {path.name for path in three.folder.iterdir()}
    assert names == {"latest", "step_00000010", "step_00000020", "step_00000030.aside"}
    save(three, 30)
    assert not list(three.folder.glob("*.aside"))


def test_a_full_disk_leaves_the_older_tags_as_they_were(three: Checkpoints):
    full = FakeEngine(OSError(28, "No space left on device"))
    with pytest.raises(
        TrainError,
        match=r"step_00000040: No space left on device; the newest good checkpoint is step_00000030",
    ):
        save(three, 40, full)
    assert not list(three.folder.glob("*40*"))
    assert three.find("auto") == "step_00000030"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(
        TrainError, match=r"could not write checkpoint .*step_00000010.* no earlier checkpoint"
    ):
        save(checkpoints(tmp_path / "checkpoints"), 10)


def test_weights_lie_in_a_folder_of_their_own_too(three: Checkpoints, tmp_path: Path):
    shutil.copy(newest_weights(three.folder.parent), tmp_path / "model.safetensors")
    assert newest_weights(tmp_path) == tmp_path / "model.safetensors"


def test_the_manifest_lists_every_other_file(three: Checkpoints):
    folder = three.folder / "step_00000010"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {"manifest.json"}


@pytest.mark.parametrize(
    "manifest",
    ["[]", "null", '{"files": []}', '{"files": {}}', '{"files": {"trainer.json": {}}}', "[" * 100_000],
)
def test_a_manifest_that_says_nothing_is_damage(
    three: Checkpoints, capsys: pytest.CaptureFixture[str], manifest: str
):
    """Nothing would have been checked; reading weights falls back too, and says so."""
    (three.folder / "step_00000030" / "manifest.json").write_text(manifest)
    assert three.find("auto") == "step_00000020"
    assert "step_00000030 is damaged (manifest.json" in capsys.readouterr().out
    assert newest_weights(three.folder.parent).parent.name == "step_00000020"
    assert "step_00000030 is damaged (manifest.json" in capsys.readouterr().err


def test_changed_weights_are_not_taken(three: Checkpoints, capsys: pytest.CaptureFixture[str]):
    path = three.folder / "step_00000030" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert newest_weights(three.folder.parent).parent.name == "step_00000020"
    assert "model.safetensors has other contents than were written): taking step_00000020" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000])
def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TrainError, match=r"model\.safetensors is damaged or no safetensors file"):
        load_weights(newest_weights(tmp_path))


@pytest.mark.parametrize("content", ["{}", "[]", '{"progress": {"stride": 1}, "origin": {}}'])
def test_a_record_of_another_version_is_refused(three: Checkpoints, content: str):
    (three.folder / "step_00000030" / "trainer.json").write_text(content)
    with pytest.raises(TrainError, match=r"trainer\.json is damaged, or of another version"):
        three.read("step_00000030")
