"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from .errors import DataError


@contextmanager
def write_whole(path: Path, label: str = "") -> Iterator[BinaryIO]:
    """Write `path` under a temporary name in its folder; it gets its own name when the block ends well.

    `label` keeps writers on different machines apart.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}{label}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write: a full disk, say
            error.filename = str(path)
        raise


def write_json(path: Path, value: Any, label: str = "") -> None:
    with write_whole(path, label) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The table in a file, with at least the keys of `kinds`, of these types. Raises DataError when it is
    not such a file."""
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
    return DataError(f"{path} is damaged ({why}); prepare the data again with --force")
