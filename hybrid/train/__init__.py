"""Training: `train(recipe)` goes from the first step, or the newest checkpoint, to the last."""

from .trainer import Summary, train

__all__ = ["Summary", "train"]
