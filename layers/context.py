"""What one call knows beside its tokens: documents, routes, the values of the first layer, its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .context_parallel import SequenceShard
from .errors import LayerError, shown
from .indices import on_device


@dataclass
class Context:
    """What one call knows beside `x`; built by the model for each call, or by `Context.of` for one layer."""

    cu_seqlens: Tensor | None = None
    """Borders of documents packed in a row `[1, T]`: int32 `[N + 1]`, first 0, last T. None: equal rows."""
    lengths: tuple[int, ...] = ()
    """The packed documents' lengths on the host; empty for equal rows."""
    want_state: bool = True
    embedding: Tensor | None = None
    """Token embeddings after this layer's own norm `[B, T, C]`: what a first-of-kind layer computes the
    shared value from. None: the layer's input itself (a layer used alone)."""
    first_values: dict[str, Tensor] = field(default_factory=dict)
    """Registry kind -> values of its first layer `[B, T, G * D]`; that layer writes, later ones read."""
    routes: dict[int, Any] | None = None
    """Layer index -> routing decisions. A layer found here replays them, another records its own;
    None: neither. For a packed row with state they are a list, one entry per document."""
    tables: dict[Any, Any] = field(default_factory=dict)
    """What layers of this call compute alike, by a key of their own: rotary tables."""
    statistics: dict[str, Tensor] | None = None
    """Where mixers leave scalars for monitoring, keyed `layer_index/name`; None: do not compute them."""
    shard: SequenceShard | None = None
    """This rank's share of a row. Then x and the fields above are of it alone, and its first segment may go
    on with the document that the rank before ends with (`shard.continues`)."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        want_state: bool = True,
        shard: SequenceShard | None = None,
        **more: Any,
    ) -> Context:
        """Make the context of a call with input `x` `[B, T, ...]`; with a `shard`, which knows the documents,
        `x` is this rank's share of the tokens.

        `cu_seqlens` is best on the host: from a GPU the host waits for it.

        Raises LayerError when there are no tokens, `cu_seqlens` does not divide the row into
        non-empty documents, or `x` is not what `shard` says.
        """
        if x.shape[0] < 1 or x.shape[1] < 1:
            raise LayerError(f"a call needs at least one sequence and one token, got shape {tuple(x.shape)}")
        if shard is not None:
            if cu_seqlens is not None:
                raise LayerError("the shard knows the row's documents: leave cu_seqlens out")
            if shard.lengths:
                cu_seqlens = torch.tensor([0, *accumulate(shard.lengths)], dtype=torch.int32)
        lengths = document_lengths(cu_seqlens, x)
        borders = None if cu_seqlens is None else on_device(cu_seqlens, x.device)
        found = cls(borders, lengths, want_state, shard=shard, **more)
        found.refuse_shard(x)
        return found

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """The documents' lengths in the whole row, be it sharded over ranks or not."""
        return self.lengths if self.shard is None else self.shard.row_lengths

    def refuse_shard(self, x: Tensor) -> None:
        """Raise LayerError unless `x` has the tokens of the shard, if there is one, and no state is
        wanted."""
        shard = self.shard
        if shard is None:
            return
        if x.shape[1] != shard.length:
            raise LayerError(
                f"{x.shape[1]} tokens on rank {shard.rank}; {shard.tokens} tokens over {shard.size} ranks "
                f"are {shard.length} each"
            )
        if self.want_state:
            raise LayerError("no state is kept of a sequence sharded over ranks: set want_state to False")

    def note(self, layer: int, **values: Tensor) -> None:
        """Store the means of `values` as the layer's scalars for monitoring; needs `statistics`."""
        assert self.statistics is not None
        self.statistics.update({f"{layer}/{name}": x.detach().float().mean() for name, x in values.items()})

    def alone(self, index: int) -> Context:
        """Make the context of one packed document, with its own routes, but nothing that has one entry for
        each token."""
        routes = None
        if self.routes is not None:
            routes = {layer: kept[index] for layer, kept in self.routes.items() if isinstance(kept, list)}
        return replace(
            self, cu_seqlens=None, lengths=(), embedding=None, first_values={}, routes=routes, tables={}
        )

    def batch(self, documents: Sequence[int]) -> Context:
        """Make the context of packed documents of equal length as one batch; only a single one has routes."""
        own = self.alone(documents[0])
        if len(documents) > 1:
            own.routes = None
        firsts = self.first_values.items()
        own.first_values = {kind: take_documents(row, documents, self.lengths) for kind, row in firsts}
        if self.embedding is not None:
            own.embedding = take_documents(self.embedding, documents, self.lengths)
        return own

    def keep_routes(self, layer: int, routes: list[Any]) -> None:
        """Record a layer's routing decisions, one entry per packed document."""
        if self.routes is not None and routes[0] is not None:
            self.routes[layer] = routes


def take_documents(row: Tensor, documents: Sequence[int], lengths: tuple[int, ...]) -> Tensor:
    """Pick documents of equal length out of a packed row `[1, T, C]`, as a batch `[documents, tokens, C]`."""
    if len(documents) == len(lengths):
        return row.reshape(len(documents), -1, row.shape[-1])
    each = row[0].split(lengths)
    return torch.stack([each[i] for i in documents])


def document_lengths(cu_seqlens: Tensor | None, x: Tensor) -> tuple[int, ...]:
    """Read from `cu_seqlens` the lengths of the documents packed in `x` `[1, T, ...]`; none without it."""
    if cu_seqlens is None:
        return ()
    whole = isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype in (torch.int32, torch.int64)
    if not whole or cu_seqlens.ndim != 1:
        raise LayerError(f"cu_seqlens must be one row of int32 in a tensor, got {shown(cu_seqlens)}")
    borders = cu_seqlens.tolist()
    if x.shape[0] != 1:
        raise LayerError(f"cu_seqlens needs one packed row, got a batch of {x.shape[0]}")
    if len(borders) < 2 or borders[0] != 0 or borders[-1] != x.shape[1]:
        raise LayerError(f"cu_seqlens must run from 0 to the row's {x.shape[1]} tokens, got {borders}")
    lengths = tuple(end - start for start, end in pairwise(borders))
    for index, length in enumerate(lengths):
        if length < 1:
            raise LayerError(
                f"document {index} of the packed row has {length} tokens (cu_seqlens {borders}); "
                "leave empty documents out"
            )
    return lengths
