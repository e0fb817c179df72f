"""The state of a text: what is needed to continue it without reading it again, as a value and a file.

It stands after prompt and continuation (with no new tokens: after the prompt). To go on from it is to go on
with the same call: state, logits, seen ids and the place in the sequence of random numbers are kept.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor, nn

from hybrid.data.tokenizer import Tokenizer
from hybrid.layers import MixerState
from hybrid.model import HybridLM, HybridState, StateError
from hybrid.model.state import digest, read_file, write_file

KEY = "bookmark"
"""Names what is not the model's state in a file."""
MOST_TOKENS, MOST_DRAWS = 2**28, 2**26
"""Of a text: what counting up to them costs stays small."""


@dataclass
class SavedState:
    """State of a text: `generate(..., on_state=...)` makes it, `generate(..., resume=...)` goes on there and
    takes the model's state over."""

    state: HybridState
    """Of one sequence, after the last token."""
    logits: Tensor
    """Of the next token `[V]`, fp32."""
    seen: Tensor
    """The different ids so far, int64 `[n]`, rising (for the repetition penalty)."""
    draws: int
    """Random numbers that the sequence has used."""
    model: str
    """`fingerprint` of the model's weights."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    source: str = "the saved state"
    """The file it was read from, for errors."""

    def to(self, device: torch.device | str) -> Self:
        return replace(
            self, state=self.state.to(device), logits=self.logits.to(device), seen=self.seen.to(device)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file; it appears whole or not at all."""
        texts, tensors = self.state.parts()
        facts = {"draws": self.draws, "model": self.model, "tokenizer": self.tokenizer}
        own = {f"{KEY}.logits": self.logits, f"{KEY}.seen": self.seen}
        write_file(path, {**texts, KEY: json.dumps(facts)}, {**tensors, **own})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote; StateError when the file is something else, or damaged."""
        texts, tensors = read_file(path)
        if KEY not in texts:
            raise StateError(
                f"{path}: a state without the text's end (hybrid generate --save-state keeps both)"
            )
        state = HybridState.of_parts(texts, tensors, path)
        try:
            own = tensors[f"{KEY}.logits"], tensors[f"{KEY}.seen"]
            found = cls(state, *own, **json.loads(texts[KEY]), source=str(path))
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise StateError(f"{path}: the state is damaged ({type(error).__name__}: {error})") from error
        surplus = tensors.keys() - state.tensors().keys() - {f"{KEY}.logits", f"{KEY}.seen"}
        found._refuse(found._fault() or (f"{min(surplus)} is of no field" if surplus else ""))
        return found

    def refuse_other(self, model: HybridLM, tokenizer: Tokenizer) -> None:
        """Raise StateError unless the state was made with these weights and this tokenizer, and is whole."""
        if self.state.layout != model.layout:
            self.state.refuse_other(model.layout, 1)
        if self.tokenizer != tokenizer.fingerprint:
            raise StateError(
                f"{self.source} was made with another tokenizer (fingerprint {self.tokenizer[:12]}) than "
                f"this model's ({tokenizer.fingerprint[:12]})"
            )
        if self.model != (own := fingerprint(model)):
            raise StateError(
                f"{self.source} was made with other weights (fingerprint {self.model[:12]}) than this "
                f"model's ({own[:12]}), and serves only the weights that made it"
            )
        self._refuse(self._fault(tokenizer.vocab_size) or _misshapen(model, self.state))
        self.state.refuse_other(model.layout, 1)

    def _refuse(self, fault: str) -> None:
        if fault:
            raise StateError(f"{self.source}: the state is damaged ({fault})")

    def _fault(self, vocab_size: int | None = None) -> str:
        """Say what is wrong with what is not the model's state; empty for nothing."""
        logits, seen, most = self.logits, self.seen, min(self.state.position, MOST_DRAWS)
        if self.state.position > MOST_TOKENS:
            return f"position is {self.state.position}; allowed: up to {MOST_TOKENS}"
        if type(self.draws) is not int or not 0 <= self.draws <= most:
            return f"{KEY}.draws is {self.draws!r}; allowed: 0 to {most}"
        if not isinstance(self.model, str) or not isinstance(self.tokenizer, str):
            return f"{KEY}.model or {KEY}.tokenizer is no text"
        size = logits.numel() if vocab_size is None else vocab_size
        if logits.dtype != torch.float32 or logits.shape != (size,) or not logits.isfinite().all():
            return f"{KEY}.logits are {logits.dtype} {list(logits.shape)}, or not finite"
        if seen.dtype != torch.int64 or seen.ndim != 1 or not (len(seen) and 0 <= seen[0] <= seen[-1] < size):
            return f"{KEY}.seen are {seen.dtype} {list(seen.shape)}, or outside the vocabulary"
        return "" if (seen.diff() > 0).all() else f"{KEY}.seen do not rise"


def _misshapen(model: HybridLM, state: HybridState) -> str:
    """Find the first field that is not as a state of `model` at this position has it; empty for none.

    The state after one token tells what stays as it is; of each tensor one axis may grow, and what a mixer
    keeps must have the bytes that it says. What this lets pass is seen by going on for a token.
    """
    first = torch.zeros(1, 1, dtype=torch.int64, device=model.head.weight.device)
    like = model(first, last_only=True)[1]
    if len(state.layers) != len(like.layers):
        return f"it has {len(state.layers)} layers"
    for index, (layer, one, mixer) in enumerate(zip(state.layers, like.layers, model.mixers, strict=True)):
        if fault := _field_fault(layer, one, f"layers.{index}", state.position):
            return fault
        assert layer.mixer is not None
        size = mixer.state_bytes(state.position, model.head.weight.element_size())
        if layer.mixer.nbytes != size:
            return f"layers.{index} has {layer.mixer.nbytes} bytes, not {size} at {state.position}"
    try:
        model(first, state.fork(), last_only=True)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"the model cannot go on from it: {type(error).__name__}: {error}"
    return ""


def _field_fault(state: MixerState, like: MixerState, name: str, position: int) -> str:
    """Find the first field of a state that another one has otherwise; empty for none."""
    if type(state) is not type(like):
        return f"{name} is a {type(state).__name__} instead of a {type(like).__name__}"
    most = max([position, *(size for tensor in state.tensors().values() for size in tensor.shape)])
    for key in [field.name for field in fields(state) if not field.name.startswith("_")]:
        value, wanted = getattr(state, key), getattr(like, key)
        if isinstance(wanted, MixerState):
            if fault := _field_fault(value, wanted, f"{name}.{key}", position):
                return fault
        elif isinstance(value, Tensor):
            fits = value.ndim > 0 and len(value) == 1 and bool(value.isfinite().all())
            if isinstance(wanted, Tensor):  # else there is none yet after one token
                grown = [a != b for a, b in zip(value.shape, wanted.shape, strict=False)]
                fits = fits and value.ndim == wanted.ndim and sum(grown) <= 1 and value.dtype == wanted.dtype
            if not fits:
                return f"{name}.{key} is {value.dtype} {list(value.shape)}, or not finite"
        elif type(value) is not type(wanted) or (key == "position" and value != position):
            return f"{name}.{key} is {value!r}"
        elif isinstance(value, int) and not 0 <= value <= most:
            return f"{name}.{key} is {value}; allowed: 0 to {most}"
    return ""


def fingerprint(model: nn.Module) -> str:
    """Hash the parameters' names, types and values with SHA-256."""
    return digest(dict(model.named_parameters()))
