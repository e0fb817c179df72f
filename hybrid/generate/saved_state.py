"""The state of a text: what is needed to continue it without reading it again, as a value and a file.

It stands after prompt and continuation (with no new tokens: after the prompt). To go on from it is to go on
with the same call: state, logits, seen ids and the place in the sequence of random numbers are kept.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from hybrid.data.tokenizer import Tokenizer
from hybrid.model import HybridLM, HybridState, StateError
from hybrid.model.state import digest, read_file, write_file

KEY = "bookmark"
"""Names what is not the model's state in a file."""


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
            return cls(state, tensors[f"{KEY}.logits"], tensors[f"{KEY}.seen"], **json.loads(texts[KEY]))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{path}: the state is damaged ({type(error).__name__}: {error})") from error

    def refuse_other(self, model: HybridLM, tokenizer: Tokenizer) -> None:
        """Raise StateError unless the state was made with these weights and this tokenizer."""
        self.state.refuse_other(model.layout, 1)
        if self.tokenizer != tokenizer.fingerprint:
            raise StateError(
                f"the saved state was made with another tokenizer (fingerprint {self.tokenizer[:12]}) than "
                f"this model's ({tokenizer.fingerprint[:12]})"
            )
        if self.model != (own := fingerprint(model)):
            raise StateError(
                f"the saved state was made with other weights (fingerprint {self.model[:12]}) than this "
                f"model's ({own[:12]}), and serves only the weights that made it"
            )


def fingerprint(model: nn.Module) -> str:
    """Hash the parameters' names, types and values with SHA-256."""
    return digest(dict(model.named_parameters()))
