"""Where everything lies when the updates of a group are made at once: index lists, made once per shape.

Shapes: U updates, states h = 0 (before the first) to U, N sequences, R rows (chunks entering the state, by
update, then by sequence), G key/value heads, S slots after the last update, K slots read: those of state h by
sequence n follow each other, by h, then by n.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ..indices import kept, on_device
from ..softmax.ragged import Ragged, ragged
from .spec import Update

GROUP_BYTES = 2 << 30
"""Memory that the states of a group may take, with what is made of them; it has one update at least."""


class Steps(NamedTuple):
    """The updates of a group, and where in memory everything lies."""

    updates: tuple[Update, ...]
    readers: tuple[int, ...]
    """How many sequences read each state, `[U + 1]`."""
    keys: Ragged | None
    """The slots that rows of queries read; None: nobody reads."""
    table: Tensor
    """int32 `[U + 1, 5]`, of each state: first row of the update that makes it, its sequences (0 and 0 of
    state 0), slots, readers, and the first of K that they read."""
    place: Tensor
    """First slot of a row's sequence and head, among `[N, G, S]`; int64 `[R, G]`."""
    start: Tensor
    """Last slot before a row's update, among `[N, G, S]`; int64 `[R, G]`."""
    total: Tensor
    """First slot of a row's sequence and head, among `[U + 1, N, G, S]`; int64 `[R, G]`."""
    total_back: Tensor
    """The same where the states lie in reverse."""
    read: Tensor
    """Place of every slot read, among `[U + 1, N, G, S]`; int64 `[K, G]`."""
    read_back: Tensor

    @property
    def sequences(self) -> int:
        return self.updates[0].sequences

    @property
    def slots(self) -> int:
        return self.updates[-1].after

    def sizes(self) -> list[int]:
        """Count the rows of each update."""
        return [update.sequences for update in self.updates]


@kept
def steps(
    updates: tuple[Update, ...], readers: tuple[int, ...], heads: int, chunk: int, device: torch.device
) -> Steps:
    """Lay out a group; `readers`: how many sequences read each state, the one before the first included."""
    count, sequences, slots = len(updates), updates[0].sequences, updates[-1].after
    states = [updates[0].before, *(update.after for update in updates)]
    rows = [(h, n) for h, update in enumerate(updates, 1) for n in range(update.sequences)]
    seen = [(h, n) for h, number in enumerate(readers) for n in range(number)]
    lengths = [states[h] for h, _ in seen]

    def first(where: Sequence[tuple[int, int]]) -> Tensor:
        """Find the first slots `[len(where), G]`, among `[.., N, G, S]`, of states and sequences."""
        index = torch.tensor([h * sequences + n for h, n in where], dtype=torch.int64)
        return (index[:, None] * heads + torch.arange(heads)) * slots

    def each(firsts: Tensor) -> Tensor:
        """Find all slots `[K, G]` of stretches that begin there."""
        own = torch.cat([torch.arange(length) for length in lengths] or [torch.empty(0, dtype=torch.int64)])
        return firsts.repeat_interleave(torch.tensor(lengths, dtype=torch.int64), 0) + own[:, None]

    def back(where: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(count - h, n) for h, n in where]

    key_starts = accumulate((r * s for r, s in zip(readers, states, strict=True)), initial=0)
    row_starts = accumulate((update.sequences for update in updates), initial=0)
    table = [
        [row, sequence, slot, reader, key]
        for row, sequence, slot, reader, key in zip(
            [0, *row_starts], [0, *(u.sequences for u in updates)], states, readers, key_starts, strict=False
        )
    ]
    place = first([(0, n) for _, n in rows])
    start = place + torch.tensor([[updates[h - 1].before - 1] for h, _ in rows])
    tensors = (
        torch.tensor(table, dtype=torch.int32), place, start, first(rows),
        first(back(rows)), each(first(seen)), each(first(back(seen))),
    )  # fmt: skip
    keys = ragged(lengths, chunk, device) if lengths else None
    return Steps(updates, readers, keys, *(on_device(t, device) for t in tensors))


def update_bytes(update: Update, heads: int, size: int, chunk: int) -> int:
    """Estimate the memory of one update in a group: five copies of its slots, and scores among its tokens."""
    return 4 * update.sequences * heads * (5 * 2 * update.after * size + chunk * chunk)
