"""What a path means in a recipe and on the command line: `~` is somebody's home, the rest goes from the
working directory on."""

from __future__ import annotations

import os
from typing import Annotated

LONGEST_NAME = 255
"""Bytes of one name in a path, on every usual file system."""
LONGEST_PATH = 4095
"""Bytes of a whole path, for Linux."""


def local_path(text: str) -> str:
    """Expand a leading `~` or `~user`; a ValueError says why no file can have this path."""
    if not text:
        raise ValueError("expected a path, found an empty text")
    if "\0" in text:
        raise ValueError(f"no path holds a NUL character, found {_shortened(text)}")
    found = os.path.expanduser(text)
    if found.startswith("~"):
        user = found[1:].partition("/")[0]
        whose = f"there is no user {_shortened(user)}" if user else "no home folder is known"
        raise ValueError(
            f"{_shortened(text)}: {whose}; write ./{_shortened(text)[1:-1]} for a file of that name"
        )
    sizes = [len(os.fsencode(name)) for name in found.split("/")]
    if max(sizes) > LONGEST_NAME:
        words = f"a name of {max(sizes)} bytes is too long for a path (at most {LONGEST_NAME})"
        raise ValueError(f"{words}, found {_shortened(text)}")
    if len(os.fsencode(found)) > LONGEST_PATH:
        words = f"a path of {len(os.fsencode(found))} bytes is too long (at most {LONGEST_PATH})"
        raise ValueError(f"{words}, found {_shortened(text)}")
    return found


def source_path(text: str) -> str:
    """Check a path, pattern or corpus of a source, which stays as it is written: what was prepared from it
    is known by that."""
    local_path(text)
    return text


def _shortened(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


LocalPath = Annotated[str, local_path]
"""A recipe's key that is a path: `~` is expanded when the recipe is loaded."""
SourcePath = Annotated[str, source_path]
"""A path of a source: `~` is expanded where its files are listed."""
