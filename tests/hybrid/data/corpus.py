"""Small texts and tokenizers shared by the tests of hybrid.data."""

from __future__ import annotations

import json
import random
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.data.preparation.tokenizer_training import train_tokenizer
from hybrid.data.tokenizer import Tokenizer
from hybrid.recipe.schema import DataSection, SourceSection

DIGITS = 276
"""Size of the smallest vocabulary for digits, space and a few letters: every character is one id."""


def stdlib_texts(count: int) -> list[str]:
    """Some of the standard library's larger files."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path.read_text("utf-8") for path in sorted(root.glob("[b-z]*.py"))[:count]]


def digit_tokenizer(path: Path) -> Tokenizer:
    """Each digit is one id (digits are never joined), so a document of n digits has n tokens."""
    _digits().save(path)
    return _digits()


@cache
def _digits() -> Tokenizer:
    return train_tokenizer(["0123456789 abc\n"] * 5, DIGITS)[0]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def digits_data(folder: Path, sources: dict[str, list[str]], **settings: Any) -> DataSection:
    """A section over documents of digits; one JSONL file a source, nothing held out unless said."""
    tokenizer = folder / "digits.model"
    if not tokenizer.exists():
        digit_tokenizer(tokenizer)
    shares = settings.pop("validation", 0.0)
    weights = settings.pop("weights", {})
    sections = {
        name: SourceSection(
            paths=[str(write_jsonl(folder / f"{name}.jsonl", texts))],
            validation=shares,
            weight=weights.get(name, 1.0),
        )
        for name, texts in sources.items()
    }
    return DataSection(
        folder=str(folder / "prepared"), sources=sections, tokenizer=str(tokenizer), **settings
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder but the empty lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def python_data(tmp_path: Path, model: Path, files: int = 12) -> DataSection:
    """Some Python in JSONL files of a quarter megabyte."""
    texts = stdlib_texts(60)
    (tmp_path / "text").mkdir()
    for number in range(files):
        random.Random(number).shuffle(texts)
        write_jsonl(tmp_path / "text" / f"{number:02d}.jsonl", texts[:4])
    source = SourceSection(paths=[str(tmp_path / "text")], validation=0.2)
    return DataSection(folder=str(tmp_path / "out"), sources={"py": source}, tokenizer=str(model))
