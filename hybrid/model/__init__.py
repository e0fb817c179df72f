"""The language model around the mixers: embedding, blocks, head, and the state it carries between calls."""

from .block import ModelError
from .lm import HybridLM
from .state import HybridState, StateError

__all__ = ["HybridLM", "HybridState", "ModelError", "StateError"]
