from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.data.preparation.tokenizer_training import train_tokenizer
from hybrid.data.tokenizer import Tokenizer

from .corpus import stdlib_texts


@pytest.fixture(scope="session")
def python_tokenizer() -> Tokenizer:
    """A BPE model of 1000 ids trained on a little Python."""
    return train_tokenizer(stdlib_texts(12), 1000)[0]


@pytest.fixture(scope="session")
def python_model(python_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "python.model"
    python_tokenizer.save(path)
    return path
