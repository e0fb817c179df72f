"""The modules that PEFT adapts by default in our models."""

from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from hybrid.recipe.config_json import MODEL_TYPE


def register() -> None:
    """Let LoRA adapt every linear layer of every mixer and feed-forward."""
    TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING[MODEL_TYPE] = "all-linear"
