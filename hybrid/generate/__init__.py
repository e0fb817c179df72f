"""Text from a trained model: prompts are read, tokens sampled, the state saved to go on from."""

from .decoding import Continuation, generate, load_model, prefill
from .sampling import GenerateError, Settings
from .saved_state import SavedState

__all__ = ["Continuation", "GenerateError", "SavedState", "Settings", "generate", "load_model", "prefill"]
