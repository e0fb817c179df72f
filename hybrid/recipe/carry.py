"""Whether a model can train in successive pieces (`train.tbptt_chunks`): no layer may keep every token."""

from __future__ import annotations

from .letters import LayerSpec
from .schema import Recipe

LONG = 2**20
"""Tokens after which a state that doubles with the text is one that keeps every token."""


def problem(recipe: Recipe, layers: list[LayerSpec]) -> str | None:
    """What stands against the recipe's pieces, in words."""
    count, context = recipe.train.tbptt_chunks, recipe.data.context
    if count == 1:
        return None
    import torch

    from hybrid.layers import Site, mixer_class

    for index, spec in enumerate(layers):
        with torch.device("meta"):
            site = Site(recipe.model.hidden_size, index, len(layers))
            mixer = mixer_class(spec.kind)(spec.options, site)
        if mixer.state_bytes(2 * LONG) < 1.9 * mixer.state_bytes(LONG):
            continue
        whole, piece = mixer.state_bytes(context), mixer.state_bytes(-(-context // count))
        return (
            f"is {count}, but layer {index} ('{spec.letter}', {spec.kind}) keeps every token: its state has "
            f"{whole:,} bytes a sequence after data.context {context:,} tokens and {piece:,} after a piece. "
            "Pieces bound the memory only where no layer's state grows like the text; allowed with this "
            "pattern: 1"
        )
    return None
