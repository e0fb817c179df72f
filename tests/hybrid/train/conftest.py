"""Data for the tiny recipe, prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import tiny


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe file whose data is prepared; give every run its own output."""
    return tiny.prepare(tmp_path_factory.mktemp("tiny"))
