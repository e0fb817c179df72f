"""Recipes to load, to change and to train."""

from pathlib import Path

import pytest

from hybrid import layers

from .train import tiny
from .two_kinds import BASE, Slots, Wide


@pytest.fixture
def two_kinds(monkeypatch):
    """They are all the kinds there are."""
    kinds = {"full": Wide, "kvm": Slots}
    monkeypatch.setattr(layers, "kinds", lambda: kinds)
    monkeypatch.setattr(layers, "mixer_class", kinds.__getitem__)


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def base(write):
    return write(BASE, "base.yaml")


@pytest.fixture(scope="session")
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe file whose data is prepared; give every run its own output."""
    return tiny.prepare(tmp_path_factory.mktemp("tiny"))
