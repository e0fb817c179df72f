"""HybridConfig: the `config.json` of a model of ours in a Hugging Face folder.

Beside the keys that all of transformers knows (`num_hidden_layers`, `hidden_size`, `vocab_size`, ...) it
holds `model`, the model section of a recipe with every option written out: `pattern`, `expanded` (one letter
a layer) and `layers` (what each letter means).
"""

from typing import Any

from transformers import PreTrainedConfig

from hybrid.recipe.config_json import MODEL_TYPE, config_of, section_of
from hybrid.recipe.schema import ModelSection


class HybridConfig(PreTrainedConfig):
    """Configuration of a HybridForCausalLM.

    Raises ConfigError where the other keys and `model` do not describe one model.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ("cache",)

    model: dict[str, Any] | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not self.is_remote_code():
            kwargs.pop("auto_map", None)  # where the folder's own code is: this is the installed one
        super().__post_init__(**kwargs)
        if self.model is not None:
            section_of(vars(self))

    @classmethod
    def of_section(cls, section: ModelSection, **kwargs: Any) -> "HybridConfig":
        """Describe the model of a complete model section."""
        return cls(**config_of(section), **kwargs)

    def section(self) -> ModelSection:
        """Give the model section that the model is built from."""
        return section_of(vars(self))


def register() -> None:
    """Let `AutoConfig` read our folders."""
    from transformers import AutoConfig  # its import calls this function

    AutoConfig.register(MODEL_TYPE, HybridConfig, exist_ok=True)
