"""Recipes to load and to change."""

import pytest

from hybrid import layers

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
