"""Files that are whole or not there, and their checksums."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DataError

PARTIAL = ".partial"
"""Ends the name of a file or folder that is still being written."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name in its folder; rename it to `path` when the block ends well.

    The temporary file is new and of a random name, so that nothing is written through a link that somebody
    laid there. An OSError without a file name, as of a full disk, gets the path's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def no_link(path: str, flags: int) -> int:
    """Open a file as `open(..., opener=no_link)`: a link is an OSError, nothing is written through it."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "is a link, through which nothing is written: remove it"
        raise


@contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[OSError | None]:
    """Hold the lock of a file, made if need be, while the block runs.

    Yields why there is no lock where the file system has none, else None. Links are not followed, and nothing
    is written. Raises BlockingIOError when another process holds it and `wait` is false, OSError when it is
    no plain file or cannot be opened.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        missing: OSError | None = None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError as error:
            missing = error
        yield missing
    finally:
        os.close(handle)


class AppendedFile:
    """A file that only grows. What a full disk does not take is kept, and written before what comes next."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115 (closed by close)
        self._path, self._waiting = path, bytearray()

    def write(self, data: bytes) -> None:
        """Take bytes, for the next flush."""
        self._waiting += data

    def flush(self, *, sync: bool = False) -> None:
        """Hand all bytes taken to the system, with `sync` to the disk too. Raises OSError."""
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Close the file, without what was not flushed."""
        self._file.close()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file that appears whole or not at all. Raises OSError."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON to a file that appears whole or not at all. Raises OSError."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Read the table in a file, with at least the keys of `kinds`, of these types.

    Raises DataError when it is not such a file, OSError when it cannot be read.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(path, "it holds no table")
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise damaged(path, f"'{key}' is missing or no {kind.__name__}")
    return found


def damaged(path: Path, why: str) -> DataError:
    """Make the error of a prepared file that is not as it was written."""
    return DataError(f"{path} is damaged ({why}); prepare the data again with --force")


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Hash a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
