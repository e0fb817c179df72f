"""HybridForCausalLM: our model as one of transformers, with `generate`, pipelines, PEFT and the Trainer."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from hybrid.model import HybridLM, HybridState
from hybrid.recipe.letters import layer_specs

from .configuration import HybridConfig


class HybridCache(Cache):
    """The states of a batch's rows, each after its own tokens. Padding never enters them."""

    is_croppable = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[HybridState] = []
        """One a row; empty before the first call."""
        self.columns = 0
        """Columns of the batch that were read, padding included."""

    @property
    def is_linear(self) -> list[bool]:
        """Let `generate` leave out the first of its ids, where they were read already."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give row i what row `beam_idx[i]` had."""
        self.states = [self.states[row].fork() for row in beam_idx.tolist()]

    def crop(self, *_: Any, **__: Any) -> None:
        raise ValueError("the state of a hybrid model cannot be rolled back: read the shorter text anew")


class HybridForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of ours; `model` is the HybridLM."""

    config_class = HybridConfig
    config: HybridConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012 (transformers' form)
    _no_split_modules = ["Block"]  # noqa: RUF012
    _is_stateful = True  # refuses assisted decoding, which has to roll a cache back
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        section = config.section()
        self.model = HybridLM(section, layer_specs(section))
        if self.device.type != "meta":
            for parameter in self.parameters():
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: HybridCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss where labels are given.

        Args:
            input_ids: int `[B, T]`; with a cache only the tokens that are new.
            attention_mask: `[B, columns read + T]` of ones, with zeros before a row's first token only: left
                padding, which is left out of the computation.
            cache: what the call before returned; it is changed.
            labels: int `[B, T]`, shifted here as in all of transformers; -100 is not counted, nor are padding
                and each row's first token.
            use_cache: None: unless labels are given or the model is in training mode.
            logits_to_keep: only the last so many columns' logits; 0: all.

        Returns:
            logits fp32 `[B, T, V]`, 0 at padding; the loss; the cache.

        Raises:
            ValueError: other masks, and arguments that have no meaning here.
        """
        cache = others.pop("past_key_values", cache)
        items = others.pop("num_items_in_batch", None)
        for name, value in others.items():
            if value is not None and value is not False:
                raise ValueError(f"{name} has no meaning for {type(self).__name__}: leave it out")
        if cache is not None and not isinstance(cache, HybridCache):
            raise ValueError(f"cache must be what an earlier call returned, got {type(cache).__name__}")
        if use_cache is None:
            use_cache = labels is None and not self.training
        if cache is None and use_cache:
            cache = HybridCache()
        padding = _padding(input_ids, attention_mask, cache)
        logits = self._logits(
            input_ids, padding, cache, last_only=isinstance(logits_to_keep, int) and logits_to_keep == 1
        )
        loss = None
        if labels is not None:
            column = torch.arange(input_ids.shape[1], device=labels.device)
            uncounted = column <= torch.tensor(padding, device=labels.device)[:, None]
            loss = self.loss_function(
                logits=logits,
                labels=labels.masked_fill(uncounted, -100),
                vocab_size=self.config.vocab_size,
                num_items_in_batch=items,
            )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(loss=loss, logits=cast(Any, logits[:, kept]), cache=cache)

    def _logits(self, ids: Tensor, padding: list[int], cache: HybridCache | None, last_only: bool) -> Tensor:
        """Read tokens and update the cache; rows with padding or states of their own as one packed row."""
        if cache is None and not any(padding):
            return self.model(ids, want_state=False, last_only=last_only)[0]
        rows = [row[first:] for row, first in zip(ids, padding, strict=True)]
        lengths = torch.tensor([0, *map(len, rows)], device=ids.device)
        logits, states = self.model(
            torch.cat(rows)[None],
            None if cache is None else cache.states or None,
            cu_seqlens=lengths.cumsum(0, dtype=torch.int32),
            want_state=cache is not None,
            last_only=last_only,
        )
        if cache is not None:
            cache.states, cache.columns = states, cache.columns + ids.shape[1]
        if last_only:
            return logits.transpose(0, 1)
        real = torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]
        whole = logits.new_zeros(*ids.shape, logits.shape[-1])
        whole[real.to(ids.device)] = logits[0]
        return whole

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def _init_weights(self, module: nn.Module) -> None:
        """Refuse to make weights up; a new model's are initialised when it is built."""
        names = [name for name, own in self.named_modules() if own is module]
        missing = [
            name for name, p in module.named_parameters(recurse=False) if not hasattr(p, "_is_hf_initialized")
        ]
        if missing:
            raise ValueError(f"weights are missing in the folder: {names[0]}.{missing[0]}")

    def tie_weights(self, *arguments: Any, **options: Any) -> Any:
        """Tie the head again, which loading leaves on the meta device, as no file holds it."""
        self.model.tie_head()
        return super().tie_weights(*arguments, **options)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def resize_token_embeddings(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the vocabulary of a hybrid model cannot be resized: convert it anew")

    def _set_gradient_checkpointing(self, enable: bool = True, *_: Any, **__: Any) -> None:
        """Keep only the blocks' inputs, and run the blocks again in the backward pass, our own way."""
        self.model.activation_checkpointing = self.gradient_checkpointing = enable


def _padding(ids: Tensor, mask: Tensor | None, cache: HybridCache | None) -> list[int]:
    """Count the padding before each row's first token in these columns. ValueError for any other mask."""
    rows, new = ids.shape
    before = cache.columns if cache is not None else 0
    states = cache.states if cache is not None else []
    if states and len(states) != rows:
        raise ValueError(f"the cache holds {len(states)} rows, input_ids {rows}")
    if mask is None:
        return [0] * rows
    if mask.shape != (rows, before + new):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {(rows, before + new)}, "
            f"for {before} columns read and {new} new ones"
        )
    if ((mask != 0) & (mask != 1)).any() or (mask[:, 1:] < mask[:, :-1]).any():
        raise ValueError(
            "attention_mask must be 0 before a row's first token and 1 from there on (left padding): these "
            "models have no other. Padding on the right needs none: it changes nothing before it"
        )
    real = mask.sum(1).tolist()
    for row, count in enumerate(real):
        if states and count != states[row].position + new:
            read = f"{states[row].position} were read and {new} are new"
            raise ValueError(f"attention_mask has {count} tokens in row {row}, but {read}")
        if count == 0:
            raise ValueError(f"attention_mask has no token in row {row}; a row needs one or more")
    return [0] * rows if states else [new - count for count in real]


def register() -> None:
    """Let `AutoModelForCausalLM` build our models."""
    from transformers import AutoModelForCausalLM  # its import calls this function

    AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM, exist_ok=True)
