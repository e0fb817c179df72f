"""The formats that models are converted from and to, and how a path is recognised as one of them."""

from __future__ import annotations

from pathlib import Path

from hybrid.errors import ConvertError

from . import deepspeed, model_folder, paper_folder
from .common import Format
from .hf import folder as hf_folder

FORMATS: dict[str, Format] = {
    "hybrid": model_folder.FORMAT,
    "deepspeed": deepspeed.FORMAT,
    "paper": paper_folder.FORMAT,
    "hf": hf_folder.FORMAT,
}
"""By the name that `--from` and `--to` take."""


def recognise(path: Path) -> str:
    """Find the one format of a path's content. ConvertError for none, or several, with what was seen."""
    if not path.exists():
        raise ConvertError(f"{path}: no such file or folder")
    seen = {name: found for name, form in FORMATS.items() if (found := form.recognise(path))}
    if len(seen) == 1:
        return next(iter(seen))
    if seen:
        marks = "; ".join(f"{name} ({FORMATS[name].words}) by its {mark}" for name, mark in seen.items())
        raise ConvertError(f"{path} looks like several formats: {marks}. Say which with --from")
    names = sorted(p.name for p in path.iterdir())[:8] if path.is_dir() else []
    there = f"a folder with {', '.join(names) or 'nothing in it'}" if path.is_dir() else "a file"
    known = "; ".join(f"{form.words} ({name})" for name, form in FORMATS.items())
    raise ConvertError(f"{path} is {there}: none of the formats that are known. Known: {known}")
