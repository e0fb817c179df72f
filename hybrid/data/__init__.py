"""Text to batches: tokenizer, preparation (text -> token shards), loader and validation set.

The names below are imported when first used, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybrid.data.errors import DataError

if TYPE_CHECKING:
    from hybrid.data.loader import Loader
    from hybrid.data.preparation import is_prepared, outdated, prepare
    from hybrid.data.report import Report
    from hybrid.data.rows import Batch, Segment
    from hybrid.data.store import Store, train_tokens
    from hybrid.data.tokenizer import StreamDecoder, Tokenizer
    from hybrid.data.validation import ValidationSet

_HOMES = {
    "Batch": "rows",
    "Loader": "loader",
    "Report": "report",
    "Segment": "rows",
    "Store": "store",
    "StreamDecoder": "tokenizer",
    "Tokenizer": "tokenizer",
    "ValidationSet": "validation",
    "is_prepared": "preparation",
    "outdated": "preparation",
    "prepare": "preparation",
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
