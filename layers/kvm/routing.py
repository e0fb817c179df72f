"""Step 1 of KVM attention, `route`: which slot takes each token that leaves the window.

The choice depends on prepared keys, their gates and the state's LayerNorm only, carries no gradient, and is
the one sequential part: a chunk's choice depends on the slots that earlier chunks made.

Shapes: R rows (chunks entering the state, ordered by update, then by sequence), G key/value heads, C tokens
of a chunk, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import full_precision
from ..errors import LayerError
from ..indices import index
from .slots import Slots
from .spec import Update


@dataclass
class Routes:
    """The slot of every token that a call moved into the state.

    Tokens of the first chunk are in the state from the start, in slots 0, 1, ... Of packed documents, each
    one's tokens follow the previous one's.
    """

    slot: Tensor
    """int32 `[B, G, A]`."""
    founds: Tensor
    """bool `[B, G, A]`: whether the token was appended (others may be merged into its slot at once)."""
    first: int = 0
    """Absolute position of the first of the A tokens."""
    margin: Tensor | None = None
    """`[B, G, A]`: by how much the next best decision lost (inf where there was no choice), if asked for."""


class Choice(NamedTuple):
    """Decisions for rows: `slot` int64, `founds` bool and, if asked for, `margin`, each `[R, G, C]`."""

    slot: Tensor
    founds: Tensor
    margin: Tensor | None = None


class Replay(NamedTuple):
    """Routes to follow instead of own decisions."""

    routes: Routes
    starts: list[tuple[int, int]]
    """Each sequence's batch row in the routes, and the place there of its token 0."""

    def choice(self, update: Update, chunk: int) -> Choice:
        """Look up one update's tokens; LayerError where the routes do not reach."""
        slots, founds = [], []
        for row, start in self.starts[: update.sequences]:
            position = start + update.number * chunk
            begin, given = position - self.routes.first, self.routes.slot.shape[2]
            if begin < 0 or begin + chunk > given:
                raise LayerError(
                    f"the given routes are for {given} tokens from {self.routes.first} on; "
                    f"this call needs them for {chunk} from {position} on"
                )
            slots.append(self.routes.slot[row, :, begin : begin + chunk].long())
            founds.append(self.routes.founds[row, :, begin : begin + chunk])
        return Choice(torch.stack(slots), torch.stack(founds))


def joined_choices(choices: Sequence[Choice]) -> Choice:
    """Join the rows of several updates."""
    if len(choices) == 1:
        return choices[0]
    slots, founds, margins = zip(*choices, strict=True)
    return Choice(torch.cat(slots), torch.cat(founds), None if margins[0] is None else torch.cat(margins))


def in_time(choice: Choice, updates: list[Update], sequences: Iterable[int], skip: int = 0) -> Choice:
    """Gather the decisions of equally long sequences, `[B, G, A]`, without those on the first `skip` tokens.

    `updates`: of the rows `[R, G, C]` of `choice`.
    """
    counts = [update.sequences for update in updates]
    ends = list(zip(counts, accumulate(counts), strict=True))
    rows = [[end - count + b for count, end in ends if b < count] for b in sequences]
    order = index(tuple(row for own in rows for row in own), choice.slot.device).view(len(rows), -1)

    def sort(x: Tensor) -> Tensor:
        return x[order].transpose(1, 2).flatten(2)[..., skip:]

    slot, founds, margin = choice
    return Choice(sort(slot), sort(founds), None if margin is None else sort(margin))


def as_routes(choice: Choice, first: int) -> Routes:
    """Keep decisions `[B, G, A]` on tokens from absolute position `first` on."""
    return Routes(choice.slot.int(), choice.founds, first, choice.margin)


def joined_routes(routes: list[Routes]) -> Routes:
    """Join routes of consecutive tokens (or packed documents)."""
    slot, founds = torch.cat([r.slot for r in routes], 2), torch.cat([r.founds for r in routes], 2)
    margins = [r.margin for r in routes if r.margin is not None]
    return Routes(slot, founds, routes[0].first, torch.cat(margins, 2) if margins else None)


def first_slots(keys: Tensor, first: int = 0, margins: bool = False) -> Choice:
    """Give prepared keys `[n, G, C, D]` the slots `first`, `first + 1`, ..., without a choice."""
    slot = torch.arange(first, first + keys.shape[2], device=keys.device).expand(keys.shape[:3])
    margin = torch.full_like(keys[..., 0], torch.inf) if margins else None
    return Choice(slot, torch.ones_like(slot, dtype=torch.bool), margin)


@torch.no_grad()
def route(
    keys: Tensor,
    gate: Tensor | None,
    slots: Slots,
    update: Update,
    replay: Replay | None = None,
    margins: bool = False,
) -> Choice:
    """Decide on the tokens that one update takes in, or follow `replay`.

    Args:
        keys: prepared, `[n, G, C, D]`, in fp32 or wider.
        gate: merge gates `[n, G, C]`; None: all 1.
        slots: as they are before the update.
        margins: report how close each own decision was.
    """
    if update.number and replay is not None:
        return replay.choice(update, keys.shape[2])
    if update.number == 0 or update.after - update.before == keys.shape[2]:
        return first_slots(keys, update.before, margins and replay is None)
    gate = gate if slots.spec.gate_keys else None
    with full_precision(keys):
        return _decide(keys, gate, slots.routing_keys(update.sequences), update, slots, margins)


def _decide(
    keys: Tensor, gate: Tensor | None, old: Tensor, update: Update, slots: Slots, margins: bool
) -> Choice:
    """`gate`: of keys; `old`: the slots before the update in read form, `[n, G, S, D]`."""
    spec, appended = slots.spec, update.after - update.before
    scores = keys @ old.mT
    candidates = scores[..., spec.sinks :]
    best, slot = _best(candidates)
    slot += spec.sinks
    novelty = best
    if appended:
        if spec.sinks:
            novelty = torch.maximum(best, scores[..., : spec.sinks].amax(-1))
        # Stable: of equally novel tokens the earlier one is appended. In the state they stand in time order.
        order = novelty.argsort(dim=-1, stable=True)
        founders = order[..., :appended].sort(-1).values
        new = torch.take_along_dim(keys, founders[..., None], 2)
        if gate is not None and spec.gate_appends:
            new = new * torch.take_along_dim(gate, founders, 2)[..., None]
        fresh = keys @ slots.norm(new).mT
        better, place = _best(fresh)
        slot = torch.where(better > best, update.before + place, slot)
        if margins:
            candidates = torch.cat((candidates, fresh), -1)
    if gate is not None:
        # A gate that underflowed to 0 makes all candidates equal. Any other leaves their order alone.
        slot = torch.where(gate == 0, spec.sinks, slot)
    margin = _margins(novelty, candidates, appended) if margins else None
    founds = torch.zeros_like(slot, dtype=torch.bool)
    if appended:
        founds.scatter_(-1, founders, True)
        new_slots = update.before + torch.arange(appended, device=slot.device)
        slot = slot.scatter(-1, founders, new_slots.expand_as(founders))
    return Choice(slot, founds, margin)


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best of each row's candidates (-inf of none) and which it is: of equal ones the first."""
    if not scores.shape[-1]:
        nothing = scores.new_full(scores.shape[:-1], -torch.inf)
        return nothing, torch.zeros_like(nothing, dtype=torch.int64)
    best, place = scores.max(-1)  # one pass over them, in less time than argmax needs
    return best, place


def _margins(novelty: Tensor, candidates: Tensor, appended: int) -> Tensor:
    """Distance of each token from being treated differently: by rank, and for merged tokens by slot."""
    margin = torch.full_like(novelty, torch.inf)
    if candidates.shape[-1] > 1:
        best = candidates.topk(2, -1).values
        margin = best[..., 0] - best[..., 1]
    if appended:
        ranked, order = novelty.sort(dim=-1, stable=True)
        merged = torch.ones_like(novelty, dtype=torch.bool).scatter(-1, order[..., :appended], False)
        by_rank = torch.where(
            merged, novelty - ranked[..., appended - 1, None], ranked[..., appended, None] - novelty
        )
        margin = torch.where(merged, torch.minimum(margin, by_rank), by_rank)
    return margin
