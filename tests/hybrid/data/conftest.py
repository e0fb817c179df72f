from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.data.preparation.tokenizer_training import train_tokenizer
from hybrid.data.tokenizer import Tokenizer

from .corpus import stdlib_texts


@pytest.fixture(scope="session")
def python_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A BPE model of 1000 ids trained on a little Python."""
    path = tmp_path_factory.mktemp("tokenizer") / "python.model"
    return train_tokenizer(stdlib_texts(12), 1000, path)


@pytest.fixture(scope="session")
def python_model(python_tokenizer: Tokenizer) -> Path:
    return Path(python_tokenizer.origin.removeprefix("tokenizer "))
