"""What one call knows beside its tokens: documents, routes, the first layer's values, the cut over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .cut import SequenceCut
from .errors import LayerError, shown


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
    cut: SequenceCut | None = None
    """How the row is cut over ranks. Then x and the fields above are of this rank's chunk alone, whose first
    piece may go on with the document that the rank before ends with (`cut.continues`)."""

    @classmethod
    def of(
        cls,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        want_state: bool = True,
        cut: SequenceCut | None = None,
        **more: Any,
    ) -> Context:
        """Context of a call with input `x` `[B, T, ...]`; with a `cut`, which knows the documents, `x` is
        this rank's chunk.

        Raises LayerError when there are no tokens, `cu_seqlens` does not cut the row into non-empty
        documents, or the chunk is not what `cut` says.
        """
        if x.shape[0] < 1 or x.shape[1] < 1:
            raise LayerError(f"a call needs at least one sequence and one token, got shape {tuple(x.shape)}")
        if cut is not None:
            if cu_seqlens is not None:
                raise LayerError("a row cut over ranks has its documents in the cut: leave cu_seqlens out")
            if cut.lengths:
                borders = [0, *accumulate(cut.lengths)]
                cu_seqlens = torch.tensor(borders, dtype=torch.int32, device=x.device)
        found = cls(cu_seqlens, document_lengths(cu_seqlens, x), want_state, cut=cut, **more)
        found.refuse_chunk(x)
        return found

    def note(self, layer: int, **values: Tensor) -> None:
        """Leave the means of `values` as the layer's scalars, where `statistics` is wanted."""
        assert self.statistics is not None
        self.statistics.update({f"{layer}/{name}": x.detach().float().mean() for name, x in values.items()})

    @property
    def whole(self) -> tuple[int, ...]:
        """The documents' lengths in the whole row, be it cut over ranks or not."""
        return self.lengths if self.cut is None else self.cut.whole

    def refuse_chunk(self, x: Tensor) -> None:
        """LayerError unless `x` is a chunk as the cut, if there is one, has them, and no state is wanted."""
        if self.cut is None:
            return
        if x.shape[1] != self.cut.length:
            raise LayerError(
                f"{x.shape[1]} tokens on rank {self.cut.rank}; {self.cut.tokens} tokens over {self.cut.size} "
                f"ranks are {self.cut.length} each"
            )
        if self.want_state:
            raise LayerError("no state is kept of a sequence cut over ranks: set want_state to False")

    def alone(self, index: int) -> Context:
        """The context of one packed document without what it has for every token: its own routes."""
        routes = None
        if self.routes is not None:
            routes = {layer: kept[index] for layer, kept in self.routes.items() if isinstance(kept, list)}
        return replace(
            self, cu_seqlens=None, lengths=(), embedding=None, first_values={}, routes=routes, tables={}
        )

    def keep_routes(self, layer: int, routes: list[Any]) -> None:
        """Record a layer's routing decisions, one entry per packed document."""
        if self.routes is not None and routes[0] is not None:
            self.routes[layer] = routes


def document_lengths(cu_seqlens: Tensor | None, x: Tensor) -> tuple[int, ...]:
    """Lengths of the documents packed in `x` `[1, T, ...]`, on the host; empty without `cu_seqlens`."""
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
