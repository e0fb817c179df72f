"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hybrid.data.errors import DataError


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
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, label: str = "") -> None:
    with write_whole(path, label) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Raises DataError when the file is damaged."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); prepare the data again with --force") from None
