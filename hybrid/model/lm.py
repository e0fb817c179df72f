"""HybridLM: embedding, blocks, head. A pattern of mixers in the backbone of the Key-Value Means paper."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybrid.layers import Context, Flops, Mixer, initialise
from hybrid.layers.context_parallel import SequenceShard
from hybrid.layers.indices import ends
from hybrid.layers.norms import make_norm
from hybrid.recipe.letters import LayerSpec, layer_specs
from hybrid.recipe.schema import ModelSection, Recipe

from .block import Block, ModelError, build_mixers
from .head import IGNORE, Head, Lesson, Loss
from .init import INITS, embedding, head
from .state import BlockState, HybridState, StateError

SMALLEST_CHANGE = 1e-6
"""Added to the mean square of what a block adds to an entry of the stream, by which its error is divided."""
_TOO_LARGE = re.compile(r"alloc|out of memory|overflow|too large", re.IGNORECASE)
"""How torch complains about a tensor that it cannot hold."""


class HybridLM(nn.Module):
    """A language model whose layers are given one by one.

    Attributes that may be changed at any time: `loss_chunk` (tokens whose logits exist at once when labels
    are given) and `activation_checkpointing` (blocks keep only their inputs and run again in the backward
    pass, with the routes of the first run).
    """

    def __init__(self, model: ModelSection, layers: list[LayerSpec]) -> None:
        """`model.vocab_size` must be a number; `layers` from `recipe.layer_specs`.

        Parameters get their initial values from torch's global generator; on the meta device they stay
        empty: use `to_empty(device=...)` and `reset_parameters()`.
        """
        super().__init__()
        _check(model, layers)
        assert model.vocab_size is not None
        self.section = model
        self.vocab_size = model.vocab_size
        self.layers = list(layers)
        self.loss_chunk = 2048
        self.activation_checkpointing = False
        hidden = model.hidden_size
        self.embedding = nn.Embedding(self.vocab_size, hidden)
        norm = (model.norm, hidden, model.norm_eps)
        self.embedding_norm = make_norm(*norm) if model.embedding_norm else None
        self.blocks = nn.ModuleList(Block(model, mixer) for mixer in build_mixers(model, layers))
        self.norm = make_norm(*norm)
        tied = cast(nn.Parameter, self.embedding.weight) if model.tie_embeddings else None
        self.head = Head(hidden, self.vocab_size, model.logit_softcap, tied)
        self.layout = _layout(model, layers)
        if tied is not None:
            self.register_state_dict_post_hook(_drop_tied)
            self.register_load_state_dict_pre_hook(_restore_tied)
            self.register_load_state_dict_post_hook(lambda module, _: module.tie_head())
        if not self.embedding.weight.is_meta:
            self.reset_parameters()

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Self:
        """Build the model a recipe describes. ModelError when it is too large for this machine."""
        try:
            return cls(recipe.model, layer_specs(recipe.model))
        except (RuntimeError, TypeError) as error:
            if not _TOO_LARGE.search(str(error)):
                raise
            reason = str(error).strip().splitlines()[0]
            raise ModelError(f"the model is too large to be built here: {reason}") from error

    def forward(
        self,
        ids: Tensor,
        state: HybridState | list[HybridState | None] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        labels: Tensor | None = None,
        z_loss: float = 0.0,
        routes: dict[int, Any] | None = None,
        statistics: dict[str, Tensor] | None = None,
        want_state: bool | None = None,
        shard: SequenceShard | None = None,
        last_only: bool = False,
        lesson: Lesson | None = None,
    ) -> tuple[Tensor, Any] | Loss:
        """Read tokens, going on from `state`; any split of a sequence into calls gives one call's result.

        Args:
            ids: int `[B, T]`; or one packed row `[1, T]` with `cu_seqlens`. There is no padding.
            state: what the previous call returned; None at the start. For a packed row a list with one state
                (or None) per document.
            cu_seqlens: borders of the packed documents, int32 `[N + 1]`, first 0, rising, last T.
            labels: int `[B, T]`, aligned with the logits (not shifted here); -100 is not counted.
            z_loss: not 0: the loss's `z_total` carries a gradient (its weighting is the caller's).
            routes: layer -> routing decisions; a layer found there replays them, another records its own.
            statistics: dict that mixers fill with scalars for monitoring, keyed `layer/name`.
            want_state: whether a state is kept; None: without labels only.
            shard: this rank's shard of the rows; ids, labels and logits are then of its tokens alone, and
                there are no states. It knows the documents: leave cu_seqlens out.
            last_only: logits of each sequence's last token only, `[B, 1, V]`; for a packed row of N documents
                `[1, N, V]`. Saves the head's work and memory over a prompt.
            lesson: what a teacher made of the same tokens, beside labels: the loss has a `kl`; or, where it
                has streams, only a `hidden`: each block is fed with the teacher's stream and compared to it.

        Returns:
            Without labels `(logits, state)`: fp32 `[B, T, V]`, and HybridState (packed: a list of them; None
            unless wanted). With labels a `Loss` of sums over the counted tokens, with the state in it; logits
            exist for at most `loss_chunk` tokens at once.

        Raises:
            ModelError, StateError, LayerError: inputs that do not fit, before any state is changed. With
            labels on a GPU ids outside the vocabulary are only counted, without a wait: see `Loss.outside`.
        """
        self._check_ids(ids, labels)
        outside = None
        if labels is not None and ids.device.type != "cpu":
            ids, labels, outside = self._inside(ids, labels)
        else:
            self._refuse_outside("ids", ids)
            self._refuse_outside("labels", labels)
        wanted = labels is None if want_state is None else want_state
        context = Context.of(ids, cu_seqlens, want_state=wanted, shard=shard)
        context.routes, context.statistics = routes, statistics
        if labels is not None and lesson is not None and lesson.streams is not None:
            none = torch.zeros((), device=ids.device)
            error = self._block_errors(lesson.streams, context, labels != IGNORE)
            return Loss(none, (labels != IGNORE).sum(), none, None, outside, hidden=error)
        hidden, after = self._hidden(ids, context, self._block_states(state, context, ids.shape[0]))
        new_state = self._state(after, context) if wanted else None
        if labels is None:
            if last_only and context.lengths:
                hidden = hidden.index_select(1, ends(context.lengths, hidden.device))
            elif last_only:
                hidden = hidden[:, -1:]
            return self.head(hidden), new_state
        total, z_total, *kl = self.head(hidden, labels, self.loss_chunk, z_loss != 0, lesson)
        return Loss(total, (labels != IGNORE).sum(), z_total, new_state, outside, *kl)

    @torch.no_grad()
    def teach(
        self,
        ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        shard: SequenceShard | None = None,
        streams: bool = False,
    ) -> Lesson:
        """Read tokens (as in `forward`) for a student to learn from; `streams`: block by block."""
        if ids.device.type == "cpu":
            self._refuse_outside("ids", ids)
        context = Context.of(ids, cu_seqlens, want_state=False, shard=shard)
        found: list[Tensor] | None = [] if streams else None
        ids = ids.clamp(0, self.vocab_size - 1)  # on a GPU the student counts those outside
        hidden, _ = self._hidden(ids, context, [None] * len(self.blocks), found)
        return Lesson(hidden, self.head.logits, found)

    def _block_errors(self, streams: list[Tensor], context: Context, counted: Tensor) -> Tensor:
        """Sum over the counted tokens the blocks' mean error: |output - teacher's|^2 / |what the teacher's
        block adds|^2, each block fed with the teacher's stream. Frozen blocks are left out."""
        taken = [torch.zeros((), device=counted.device)]
        given = [stream.to(self.head.weight.dtype) for stream in streams]
        first_values = context.first_values
        for block, x, wanted in zip(self._blocks(), given, given[1:], strict=False):
            trained = any(parameter.requires_grad for parameter in block.parameters())
            if not trained and not block.mixer.site.first_of_kind:
                continue
            call = (x, given[0], replace(context, first_values=first_values), None)
            y, _, first_values = self._run(block, *call)
            if trained:
                wrong, added = (change.float().square().mean(-1) for change in (y - wanted, wanted - x))
                taken.append(torch.where(counted, wrong / (added + SMALLEST_CHANGE), 0.0).sum())
        return torch.stack(taken).sum() / max(1, len(taken) - 1)

    def _run(self, block: Block, x: Tensor, x0: Tensor, context: Context, state: Any) -> Any:
        """Run a block; with activation checkpointing so that it keeps only its inputs."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return block(x, x0, context, state)
        if context.routes is None:
            context = replace(context, routes={})  # the second run must take the first run's decisions
        # The second run is in the backward's thread, where a forced kernel is not known by itself.
        forced = partial(copy_context().run, block)
        return checkpoint(forced, x, x0, context, state, use_reentrant=False, preserve_rng_state=False)

    def _hidden(
        self, ids: Tensor, context: Context, states: list[Any], streams: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Compute the final hidden states `[B, T, C]` (normalised) and every block's state; `streams` takes
        what is before every block and after the last."""
        x = self.embedding(ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x0, first_values = x, context.first_values
        after = []
        for block, state in zip(self._blocks(), states, strict=True):
            if streams is not None:
                streams.append(x)
            inner = replace(context, first_values=first_values)
            x, kept, first_values = self._run(block, x, x0, inner, state)
            after.append(kept)
        if streams is not None:
            streams.append(x)
        return self.norm(x), after

    def _check_ids(self, ids: Tensor, labels: Tensor | None) -> None:
        for name, given in (("ids", ids), ("labels", labels)):
            if given is None:
                continue
            if given.dtype not in (torch.int64, torch.int32):
                raise ModelError(f"{name} must be int64 or int32, got {given.dtype}")
            if given.ndim != 2 or given.numel() == 0:
                shape = tuple(given.shape)
                raise ModelError(f"{name} must be [batch, tokens] with at least one token, got {shape}")
        if labels is not None and labels.shape != ids.shape:
            raise ModelError(f"labels have shape {tuple(labels.shape)}, ids {tuple(ids.shape)}")

    def _inside(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace ids and labels that the vocabulary does not have, and count them, without a wait."""
        known, aims = (x.clamp(0, self.vocab_size - 1) for x in (ids, labels))
        aims = torch.where(labels == IGNORE, labels, aims)
        return known, aims, (known != ids).sum() + (aims != labels).sum()

    def _refuse_outside(self, name: str, values: Tensor | None) -> None:
        """Raise ModelError naming the first id, or counted label, that the vocabulary does not have."""
        if values is None:
            return
        outside = (values < 0) | (values >= self.vocab_size)
        if name == "labels":
            outside &= values != IGNORE
        if not outside.any():
            return
        row, column = outside.nonzero()[0].tolist()
        allowed = f"0 to {self.vocab_size - 1}" + (f", or {IGNORE}" if name == "labels" else "")
        found = values[row, column].item()
        raise ModelError(f"{name}[{row}, {column}] is {found}; the vocabulary allows {allowed}")

    def _block_states(self, state: Any, context: Context, batch: int) -> list[Any]:
        """Check that the given state fits, and take it apart block by block."""
        if state is None:
            return [None] * len(self.blocks)
        if not context.lengths:
            if not isinstance(state, HybridState):
                raise ModelError(f"state must be a HybridState, got {type(state).__name__}")
            state.refuse_other(self.layout, batch)
            return list(state.layers)
        documents = len(context.lengths)
        if not isinstance(state, list | tuple) or len(state) != documents:
            found = f"{len(state)} states" if isinstance(state, list | tuple) else f"a {type(state).__name__}"
            raise ModelError(f"a packed row of {documents} documents needs as many states, got {found}")
        known = [one for one in state if one is not None]
        for one in known:
            one.refuse_other(self.layout, 1)
        if len({id(one) for one in known}) < len(known) and not torch.is_grad_enabled():
            raise StateError("one state is given for two documents; fork() it, a call takes its storage over")
        return [[None if one is None else one.layers[i] for one in state] for i in range(len(self.blocks))]

    def _state(self, after: list[Any], context: Context) -> Any:
        def whole(layers: list[BlockState]) -> HybridState:
            return HybridState(layers, layers[0].position, self.layout)

        if not context.lengths:
            return whole(after)
        return [whole([layer[i] for layer in after]) for i in range(len(context.lengths))]

    # Initialisation

    def reset_parameters(self) -> None:
        """Initialise every parameter in place, in a fixed order, from torch's global generator."""
        section = self.section
        initialise(self.embedding.weight, embedding(section.init))
        for norm in (self.embedding_norm, self.norm):
            if norm is not None:
                norm.reset_parameters()
        for block in self._blocks():
            block.reset_parameters()
        if not section.tie_embeddings:
            initialise(self.head.weight, head(section.init, self.vocab_size, section.hidden_size))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.tie_head()
        return self

    def tie_head(self) -> None:
        """Tie the head again: leaving the meta device, and loading by assignment, make new parameters."""
        if self.section.tie_embeddings:
            self.head.weight = cast(nn.Parameter, self.embedding.weight)

    # Accounts: these need no weights and work on the meta device

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers of all layers, first to last."""
        return [block.mixer for block in self._blocks()]

    def flops_per_token(self, context: int) -> Flops:
        """Count FLOPs of a token, the mean over the positions of one sequence of `context` tokens."""
        return self._flops(lambda mixer: mixer.flops_per_token(context))

    def flops_at(self, position: int) -> Flops:
        """Count FLOPs of decoding the token at `position` (0-based)."""
        return self._flops(lambda mixer: mixer.flops_at(position))

    def _flops(self, of_mixer: Callable[[Mixer], Flops]) -> Flops:
        head = Flops(2.0 * self.section.hidden_size * self.vocab_size)
        return sum((of_mixer(block.mixer) + block.ffn.flops() for block in self._blocks()), head)

    def state_bytes(self, context: int, element_size: int = 4) -> int:
        """Count bytes of one sequence's state after `context` tokens."""
        shift = self.section.hidden_size * element_size if self.section.ffn_token_shift else 0
        return sum(mixer.state_bytes(context, element_size) + shift for mixer in self.mixers)

    def exchange_bytes(self, rows: int, tokens: int, size: int, element_size: int = 4) -> list[int]:
        """Count bytes of every block as `Mixer.exchange_bytes` does."""
        return [block.exchange_bytes(rows, tokens, size, element_size) for block in self._blocks()]

    @property
    def num_parameters(self) -> int:
        return _count(self)

    @property
    def num_trained(self) -> int:
        """Count the parameters that are not frozen (see `freeze_all_but`)."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def parameter_parts(self) -> dict[str, int]:
        """Count all parameters: of embedding, mixers by kind, feed-forward, norms and head."""
        parts = {"embedding": self.embedding.weight.numel()}
        for block in self._blocks():
            name = f"mixer {block.mixer.kind}"
            parts[name] = parts.get(name, 0) + _count(block.mixer)
        parts["feed-forward"] = sum(_count(block.ffn) for block in self._blocks())
        norms: list[nn.Module | None] = [self.embedding_norm, self.norm]
        norms += [norm for block in self._blocks() for norm in (block.norm_mixer, block.norm_ffn)]
        parts["norms"] = sum(_count(norm) for norm in norms if norm is not None)
        if not self.section.tie_embeddings:
            parts["head"] = self.head.weight.numel()
        return parts

    def no_decay(self) -> set[str]:
        """Name the parameters without weight decay: what the mixers say, and elsewhere all but matrices."""
        own = [(name, p) for name, p in self.named_parameters() if ".mixer." not in name]
        names = {name for name, p in own if p.ndim < 2}
        return names | {
            f"blocks.{i}.mixer.{n}" for i, mixer in enumerate(self.mixers) for n in mixer.no_decay()
        }


def _check(model: ModelSection, layers: list[LayerSpec]) -> None:
    if model.vocab_size is None or model.vocab_size < 1:
        raise ModelError(f"model.vocab_size is {model.vocab_size}; a model needs a number of at least 1")
    if not layers:
        raise ModelError("a model needs at least one layer")
    if model.init not in INITS:
        raise ModelError(f"model.init is '{model.init}'; allowed: {', '.join(INITS)}")


def _layout(model: ModelSection, layers: list[LayerSpec]) -> tuple[str, ...]:
    """Describe all that a state depends on in words: see `HybridState.layout`."""
    shift = "with" if model.ffn_token_shift else "without"
    lines = [f"{model.hidden_size} wide {shift} feed-forward token shift"]
    for spec in layers:
        lines.append(f"{spec.kind} {json.dumps(dataclasses.asdict(spec.options), default=str)}")
    return tuple(lines)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _drop_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Store a tied weight once, as the embedding's."""
    state_dict.pop(f"{prefix}head.weight", None)


def _restore_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load a tied weight from the embedding's; another one that is stored goes to `rest[-1]`, the errors."""
    embedding = state_dict.get(f"{prefix}embedding.weight")
    if embedding is None:
        return
    if not torch.equal(state_dict.get(f"{prefix}head.weight", embedding), embedding):
        rest[-1].append("head.weight differs from embedding.weight, but model.tie_embeddings makes them one")
    state_dict[f"{prefix}head.weight"] = embedding
