"""Training: `train(recipe)` goes from the first step, or the newest checkpoint, to the last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.errors import TrainError

    from .loop import Summary
    from .trainer import train

__all__ = ["Summary", "TrainError", "train"]


def __getattr__(name: str) -> Any:
    """Import on first use: `hybrid.runs` needs checkpoints, but not the whole trainer."""
    if name == "train":
        from .trainer import train

        return train
    if name == "Summary":
        from .loop import Summary

        return Summary
    if name == "TrainError":
        from hybrid.errors import TrainError

        return TrainError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
