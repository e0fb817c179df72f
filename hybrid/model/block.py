"""The blocks of the model: norm, mixer, norm, feed-forward, put together from the parts a recipe names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.errors import UserError
from hybrid.layers import Context, Flops, LayerError, Mixer, Site, initialise, mixer_class
from hybrid.layers.context_parallel import SequenceShard
from hybrid.layers.norms import make_norm
from hybrid.layers.token_shift import Last, last_token, shift_ramp, token_shift
from hybrid.recipe.letters import LayerSpec
from hybrid.recipe.schema import ModelSection

from .init import normal_linears, orthogonal
from .state import BlockState

FEED_FORWARDS = ("relu2", "swiglu", "gelu")


class ModelError(UserError):
    """A model that cannot be built, or inputs it cannot take; the message names them and what is allowed."""


def ffn_width(model: ModelSection) -> int:
    """Return `ffn_size`, or expansion times hidden size rounded down to a multiple of 32."""
    width = model.ffn_size
    if width is None:
        width = int(model.ffn_expansion * model.hidden_size) // 32 * 32
    if width < 1:
        raise ModelError(
            f"the feed-forward has width {width} (model.ffn_size {model.ffn_size}, model.ffn_expansion "
            f"{model.ffn_expansion}, model.hidden_size {model.hidden_size}); it must be at least 1"
        )
    return width


class FeedForward(nn.Module):
    """relu2: `W2 relu(W1 h)^2`; gelu: `W2 gelu(W1 h)`; swiglu: `W2 (silu(Wg h) * W1 h)`; no biases.

    With token shift h is first mixed with the token before it, `h + x_k * (h_before - h)`, where the token
    before the first is zero (paper's code; its attention uses the first token itself there).
    """

    def __init__(self, model: ModelSection, site: Site) -> None:
        super().__init__()
        if model.feed_forward not in FEED_FORWARDS:
            allowed = ", ".join(FEED_FORWARDS)
            raise ModelError(f"model.feed_forward is '{model.feed_forward}'; allowed: {allowed}")
        self.form = model.feed_forward
        self.init = model.init
        self.site = site
        hidden, width = model.hidden_size, ffn_width(model)
        self.x_k = nn.Parameter(torch.empty(hidden)) if model.ffn_token_shift else None
        self.c_gate = nn.Linear(hidden, width, bias=False) if self.form == "swiglu" else None
        self.c_fc = nn.Linear(hidden, width, bias=False)
        self.c_proj = nn.Linear(width, hidden, bias=False)

    def forward(
        self, h: Tensor, lengths: tuple[int, ...] = (), last: Last = None, shard: SequenceShard | None = None
    ) -> Tensor:
        """Transform `h` `[B, T, C]`; a packed row has its documents' lengths, a sharded one its shard."""
        if self.x_k is not None:
            if shard is not None:
                (h,), (last,) = shard.halo(h)
            h = token_shift(h, self.x_k, last, fallback="zero", lengths=lengths)
        inner = self.c_fc(h)
        if self.form == "relu2":
            inner = F.relu(inner).square()
        elif self.form == "gelu":
            inner = F.gelu(inner)
        else:
            assert self.c_gate is not None
            inner = F.silu(self.c_gate(h)) * inner
        return self.c_proj(inner)

    def reset_parameters(self) -> None:
        if self.x_k is not None:
            power = (1 - self.site.layer / self.site.num_layers) ** 4
            initialise(self.x_k, lambda mix: shift_ramp(mix, power))
        if self.init == "normal":
            normal_linears(self)
            return
        initialise(self.c_fc.weight, orthogonal())
        if self.c_gate is not None:
            initialise(self.c_gate.weight, orthogonal())
        initialise(self.c_proj.weight, nn.init.zeros_)

    def flops(self) -> Flops:
        """Count the FLOPs of one token."""
        matrices = 2 if self.c_gate is None else 3
        return Flops(2.0 * matrices * self.c_fc.in_features * self.c_fc.out_features)


class Block(nn.Module):
    """`x += scale * mixer(norm(x)); x += scale * ffn(norm(x))`."""

    def __init__(self, model: ModelSection, mixer: Mixer) -> None:
        super().__init__()
        self.norm_mixer = make_norm(model.norm, model.hidden_size, model.norm_eps)
        self.mixer = mixer
        self.norm_ffn = make_norm(model.norm, model.hidden_size, model.norm_eps)
        self.ffn = FeedForward(model, mixer.site)
        self.scale = model.residual_scale
        self.init = model.init

    def forward(
        self, x: Tensor, x0: Tensor, context: Context, state: Any = None
    ) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Run the block, a function of its arguments alone, so that it can run again for the backward pass.

        Args:
            x: `[B, T, C]`.
            x0: the embeddings `[B, T, C]` the first layer of a kind takes its shared value from.
            context: of the whole call; mixers change nothing of it but its routes and statistics.
            state: BlockState or None; for a packed row a list of them, one per document.

        Returns:
            the new x, the state after it in the same form (None unless asked for), and the shared values
            known to the blocks after this one.
        """
        h = self.norm_mixer(x)
        shares = self.mixer.site.first_of_kind
        embedding = (h if x is x0 else self.norm_mixer(x0)) if shares else None
        inner = replace(context, embedding=embedding, first_values=dict(context.first_values))
        packed = state is not None and bool(context.lengths)
        y, mixer_state = self.mixer(h, inner, _each(state, packed, "mixer"))
        x = self._add(x, y)
        h = self.norm_ffn(x)
        x = self._add(x, self.ffn(h, context.lengths, _each(state, packed, "last"), context.shard))
        after = self._state_after(h, context, mixer_state) if context.want_state else None
        return x, after, inner.first_values

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.scale == 1 else x + self.scale * y

    def _state_after(self, h: Tensor, context: Context, mixer_state: Any) -> Any:
        last = None if self.ffn.x_k is None else last_token(h, context.lengths)
        if not context.lengths:
            return BlockState(mixer_state.position, mixer_state, last)
        lasts = [None] * len(context.lengths) if last is None else last.split(1)
        return [BlockState(one.position, one, last) for one, last in zip(mixer_state, lasts, strict=True)]

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int) -> int:
        """Count bytes as `Mixer.exchange_bytes` does, with those of the feed-forward's token shift."""
        halo = rows * (size - 1) * self.norm_ffn.size * element_size if self.ffn.x_k is not None else 0
        return self.mixer.exchange_bytes(rows, tokens, size, element_size) + halo

    def reset_parameters(self) -> None:
        self.norm_mixer.reset_parameters()
        self.norm_ffn.reset_parameters()
        self.mixer.reset_parameters()
        if self.init == "normal":
            normal_linears(self.mixer)
        self.ffn.reset_parameters()


def _each(state: Any, packed: bool, name: str) -> Any:
    """Take the field `name` of a block's state, or of each packed document's."""
    if packed:
        return [None if one is None else getattr(one, name) for one in state]
    return None if state is None else getattr(state, name)


def build_mixers(model: ModelSection, layers: list[LayerSpec]) -> list[Mixer]:
    """Build the mixers in order, the one of each kind that shares its values marked as such."""
    classes = [mixer_class(spec.kind) for spec in layers]
    sharing = _sharing_layers(model, layers, classes)
    mixers: list[Mixer] = []
    for index, (spec, cls) in enumerate(zip(layers, classes, strict=True)):
        site = Site(model.hidden_size, index, len(layers), sharing[spec.kind] == index)
        try:
            mixers.append(cls(spec.options, site))
        except LayerError as error:
            raise ModelError(f"layer {index} ('{spec.letter}', {spec.kind}): {error}") from error
    return mixers


def _sharing_layers(
    model: ModelSection, layers: list[LayerSpec], classes: list[type[Mixer]]
) -> dict[str, int]:
    """Map each registry kind to its first layer with a value residual (its first layer, where none has one).

    ModelError where layers of a kind have value residuals of unequal widths.
    """
    sharing: dict[str, int] = {}
    widths: dict[str, int] = {}
    for index, (spec, cls) in enumerate(zip(layers, classes, strict=True)):
        width = cls.value_width(spec.options, Site(model.hidden_size, index, len(layers)))
        if width is None:
            continue
        first, wanted = sharing.setdefault(spec.kind, index), widths.setdefault(spec.kind, width)
        if width != wanted:
            raise ModelError(
                f"layer {index} ({spec.kind}) has values of width {width}, layer {first} of the same kind "
                f"{wanted}: the value residual needs equal widths within a kind"
            )
    for index, spec in enumerate(layers):
        sharing.setdefault(spec.kind, index)
    return sharing
