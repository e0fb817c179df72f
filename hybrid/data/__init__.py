"""Text to batches: tokenizer, preparation (text -> token shards), loader and validation set.

The names below are imported when first used, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybrid.errors import DataError

if TYPE_CHECKING:
    from hybrid.data.preparation.prepare import is_prepared, outdated, prepare
    from hybrid.data.preparation.report import Report
    from hybrid.data.preparation.tokenizer import StreamDecoder, Tokenizer

    from .batch import Batch, Segment
    from .loader import Loader
    from .store import Store, train_tokens
    from .validation import ValidationSet

_HOMES = {
    "Batch": "batch",
    "Loader": "loader",
    "Report": "preparation.report",
    "Segment": "batch",
    "Store": "store",
    "StreamDecoder": "preparation.tokenizer",
    "Tokenizer": "preparation.tokenizer",
    "ValidationSet": "validation",
    "is_prepared": "preparation.prepare",
    "outdated": "preparation.prepare",
    "prepare": "preparation.prepare",
    "train_tokens": "store",
}

__all__ = [
    "Batch",
    "DataError",
    "Loader",
    "Report",
    "Segment",
    "Store",
    "StreamDecoder",
    "Tokenizer",
    "ValidationSet",
    "is_prepared",
    "outdated",
    "prepare",
    "train_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
