"""Text from a trained model: prompts are read, tokens sampled, the state saved to go on from."""

from .decoding import Continuation, GenerateError, generate, load_model, prefill
from .sampling import Settings
from .saved_state import Bookmark

__all__ = ["Bookmark", "Continuation", "GenerateError", "Settings", "generate", "load_model", "prefill"]
