"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hybrid.files import lock, replacing


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed below)
    with full, pytest.raises(OSError, match="No space left on device") as caught, replacing(tmp_path / "a"):
        full.write(b"x")
    assert caught.value.filename == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("kept")
    with lock(path, wait=False) as missing:
        assert missing is None
        with pytest.raises(BlockingIOError), lock(path, wait=False):
            pass
    with lock(path, wait=False):
        pass
    assert path.read_text() == "kept"


def test_a_file_system_without_locks_is_no_other_process(tmp_path: Path, monkeypatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    for wait in (False, True):
        with lock(tmp_path / "lock", wait=wait) as missing:
            assert missing is not None
            assert missing.errno == errno.ENOSYS


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling", "folder"])
def test_only_a_plain_file_is_a_lock(tmp_path: Path, kind: str) -> None:
    """A fifo would be waited for, and what a link points to would be opened."""
    path, target = tmp_path / "lock", tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    if kind == "link":
        target.write_text("kept")
    with pytest.raises(OSError), lock(path, wait=True):  # noqa: PT011 (one errno each)
        pass
    assert target.exists() == (kind == "link")
