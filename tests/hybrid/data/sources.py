"""Reading a source from its settings to its texts, as the tests of sources do."""

from __future__ import annotations

from pathlib import Path

from hybrid.data.preparation.inputs import Skips
from hybrid.data.preparation.readers import read_documents
from hybrid.data.preparation.sources import list_inputs
from hybrid.recipe.schema import SourceSection


def read(section: SourceSection) -> tuple[list[str], Skips]:
    skips = Skips()
    inputs = list_inputs("s", section, skips)
    return [text for item in inputs for text in read_documents(item, section, skips)], skips


def source(path: Path | str, content: bytes | str | None = None, **settings: str) -> SourceSection:
    """A source of one path; `content` is written there before."""
    if content is not None:
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return SourceSection(paths=[str(path)], **settings)
