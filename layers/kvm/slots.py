"""Steps 2 and 3 of KVM attention, `accumulate` and `read`, and their backwards.

An update adds its tokens to the sums in place, and reading computes again only the slots that it may have
changed. The backward takes updates back one by one: what queries send to the read form is kept there until
the reading that made it is taken back; then it goes to the sums, where every token of the update finds its
gradient in its slot. So where there are many slots, both directions do work for the tokens of a chunk, never
for all slots of all chunks.

Shapes: N sequences, n of them in an update, G key/value heads, C tokens of a chunk, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers import with_room
from ..softmax import ALL
from .contributions import TINY, Norm, Normed, Sums
from .spec import KVMSpec, Update

DENSE = 2
"""Up to so many chunks of slots an update is taken to change all of them: whole tensors are faster than
picked rows."""

Box = tuple[slice, slice, slice]
Places = tuple[Tensor, Tensor, Tensor | None]
"""Rows of flat slots that keys, values and radii (None: none change) of tokens `[n, C, G]` are added to."""


class Slots:
    """Sums of slots that tokens are added to in place, and the form they are read in."""

    def __init__(self, sums: Sums, room: int | None, norm: Norm, spec: KVMSpec, dtype: torch.dtype) -> None:
        """`sums` `[N, G, S, ...]` are copied into buffers of `room` slots (None: taken as they are, to be
        replaced but not changed); `dtype`: of what queries meet."""
        self.norm, self.spec, self.dtype = norm, spec, dtype
        self.sequences, _, self.count, _ = sums.keys.shape
        self.sums = Sums(*(x.detach() for x in sums))
        if room is not None:
            self.sums = Sums(*(with_room(x, max(room, self.count), 2) for x in self.sums))
        self.form: list[Tensor] | None = None
        """Keys and values `[N, G, S, D]` that queries meet and, where these are narrower than the sums, the
        keys in full, which routing needs; maybe with room for more. None: never read."""
        self.stale: Tensor | slice | None = ALL
        """Slots, as rows of the flat form, that have changed since they were read."""

    @property
    def room(self) -> int:
        return self.sums.keys.shape[2]

    @property
    def box(self) -> Box:
        """Index of the slots in use, in tensors `[N, G, room, ...]`."""
        return slice(0, self.sequences), ALL, slice(0, self.count)

    def replace(self, sums: Sums) -> None:
        """Take other sums `[n, G, S, ...]`, as they are after several updates."""
        self.sums, self.form, self.stale = sums, None, ALL
        self.sequences, _, self.count, _ = sums.keys.shape

    def used(self) -> Sums:
        """Return the sums `[n, G, S, ...]`; views."""
        return Sums(*(x[self.box] for x in self.sums))

    def visible(self, box: Box) -> tuple[Tensor, Tensor]:
        """Return keys and values to attend to, `[n, S, G, D]`, as last read; views."""
        assert self.form is not None
        keys, values = (x[box].transpose(1, 2) for x in self.form[:2])
        return keys, values

    def routing_keys(self, sequences: int) -> Tensor:
        """Read keys to choose from, `[n, G, S, D]`, in the sums' precision; a view."""
        refresh(self)
        assert self.form is not None
        return self.form[0 if len(self.form) == 2 else 2][:sequences, :, : self.count]

    def reserve(self, count: int) -> None:
        """Make room for `count` slots, doubling it."""
        if count > self.room:
            self.sums = Sums(*(with_room(x, 2 * count, 2) for x in self.sums))
            self.form = self.form and [with_room(x, 2 * count, 2) for x in self.form]


def accumulate(slots: Slots, added: Sums, slot_nGC: Tensor, update: Update) -> Places:
    """Add what the tokens of an update add, `[n, G, C, ...]`, to the sums of their slots, in place."""
    slots.reserve(update.after)
    places = _places(slot_nGC, update, slots.room, slots.spec)
    for sums, new, rows in zip(slots.sums, added, places, strict=True):
        if rows is not None:
            _flat(sums).index_add_(0, rows, new.transpose(1, 2).flatten(0, 2))
    slots.sequences, slots.count = update.sequences, update.after
    few = slots.stale is None and update.after > DENSE * slots.spec.chunk
    slots.stale = places[0] if few else ALL
    return places


def accumulate_backward(places: Places, d_slots: SlotGradients, out: Sums) -> None:
    """Write gradients of what an update's tokens added to `out`, `[n, C, G, ...]`."""
    for d_sums, rows, own in zip(d_slots.sums, places, out, strict=True):
        if rows is not None:
            torch.index_select(_flat(d_sums), 0, rows, out=own.flatten(0, 2))


def _places(slot_nGC: Tensor, update: Update, room: int, spec: KVMSpec) -> Places:
    """Find the rows for tokens that go to the given slots."""
    sequences, heads, chunk = slot_nGC.shape
    first = torch.arange(sequences * heads, device=slot_nGC.device).view(sequences, 1, heads) * room
    tokens = (slot_nGC.transpose(1, 2) + first).flatten()
    radius: Tensor | None = tokens
    if spec.values == "reference_counts" and update.number:
        # The public code's rule: each update adds 1 to every slot, of which there are as many as tokens.
        radius = (torch.arange(chunk, device=slot_nGC.device)[:, None] + first).flatten()
    elif spec.values == "radius" and update.after == update.before:
        radius = None
    return tokens, tokens, radius


def _flat(x: Tensor) -> Tensor:
    """View `[N, G, S, ...]` as rows `[N * G * S, ...]`."""
    return x.view(-1, x.shape[-1])


def read(slots: Slots) -> tuple[Tensor, Tensor]:
    """Return keys and values that queries meet, `[n, S, G, D]`; views, until the slots change."""
    refresh(slots)
    return slots.visible(slots.box)


class Reading:
    """Sums brought to the form they are read in, `[..., S, D]`, with the way back."""

    def __init__(self, sums: Sums, norm: Norm, spec: KVMSpec) -> None:
        self.sums = sums
        self.length: Tensor | None = None
        if spec.values == "radius":  # the direction of the sum, brought to the radius
            self.length = torch.linalg.vector_norm(sums.values, dim=-1, keepdim=True)
            self.scale = sums.radius / self.length.clamp_min(TINY)
        else:
            self.scale = sums.radius.clamp_min(1).reciprocal()  # a slot that exists counts at least 1
        self.normed = Normed(sums.keys, norm)

    def form(self, dtype: torch.dtype) -> list[Tensor]:
        """Return what `Slots.form` holds."""
        keys, values = self.normed.out, self.sums.values * self.scale
        made = [keys.to(dtype), values.to(dtype)]
        return made if dtype == keys.dtype else [*made, keys]

    def backward(self, d_keys: Tensor, d_values: Tensor, d_norm: Norm) -> Sums:
        """Return gradients of the sums; add to the norm's. Counts have none, as they depend on nothing."""
        sums, to_keys = self.sums, self.normed.backward(d_keys, d_norm)
        to_values = d_values * self.scale
        if self.length is None:
            return Sums(to_keys, to_values, torch.zeros_like(sums.radius))
        length = self.length.clamp_min(TINY)
        along = torch.linalg.vecdot(sums.values, d_values)[..., None] / length
        # A longer sum is scaled down by as much.
        shrinking = along * self.scale / length * (self.length >= TINY)
        return Sums(to_keys, to_values.addcmul_(sums.values, shrinking, value=-1), along)


class Refreshed(NamedTuple):
    """A partial or whole new reading, and the form before it."""

    reading: Reading
    rows: Tensor | None
    """Rows of the flat form that were read; None: all."""
    before: list[Tensor] | None
    """The whole form, or those rows."""
    box: Box


def refresh(slots: Slots, keep: bool = False) -> Refreshed | None:
    """Read again what has changed; `keep` the sums as they are now, and the form before, for the backward."""
    if slots.stale is None:
        return None
    rows, before = slots.stale, slots.form
    slots.stale = None
    if not isinstance(rows, Tensor):
        used = slots.used()
        reading = Reading(Sums(*(x.clone() for x in used)) if keep else used, slots.norm, slots.spec)
        slots.form = reading.form(slots.dtype)
        return Refreshed(reading, None, before, slots.box)
    reading = Reading(Sums(*(_flat(x).index_select(0, rows) for x in slots.sums)), slots.norm, slots.spec)
    assert before is not None
    slots.form = [_with_shape(x, slots.sums.keys) for x in before]
    old = [_flat(x).index_select(0, rows) for x in slots.form] if keep else None
    for own, new in zip(slots.form, reading.form(slots.dtype), strict=True):
        _flat(own).index_copy_(0, rows, new)
    return Refreshed(reading, rows, old, slots.box)


def read_backward(slots: Slots, refreshed: Refreshed, d_slots: SlotGradients) -> None:
    """Take the form's gradient through a reading to the sums, and the form back to what it was before."""
    reading, rows, before, box = refreshed
    if rows is None:
        if d_slots.form is not None:
            d_keys, d_values = (x[box] for x in d_slots.form)
            shares = reading.backward(d_keys, d_values, d_slots.norm)
            for d_sums, share in zip(d_slots.sums, shares, strict=True):
                d_sums[box] += share
        d_slots.form, slots.form = None, before
        return
    assert slots.form is not None
    assert before is not None
    if d_slots.form is not None:
        d_slots.form = [_with_shape(x, d_slots.sums.keys) for x in d_slots.form]
        once = _once(rows, d_slots.sums.keys[..., 0].numel())
        d_keys, d_values = (_flat(x).index_select(0, rows).mul_(once) for x in d_slots.form)
        shares = reading.backward(d_keys, d_values, d_slots.norm)
        for d_sums, share in zip(d_slots.sums, shares, strict=True):
            _flat(d_sums).index_add_(0, rows, share)
        for x in d_slots.form:
            _flat(x).index_fill_(0, rows, 0)
    for own, old in zip(slots.form, before, strict=True):
        _flat(own).index_copy_(0, rows, old)


class SlotGradients:
    """Gradients of a group's slots: of their sums, of their read form as it is now, and of the norm."""

    def __init__(self, slots: Slots, last: Sequence[Tensor | None], norm: Norm) -> None:
        """`last`: gradients `[n, G, S, ...]` of the sums after all updates (None: 0); `norm` is added to."""
        self.norm = norm
        self.sums = Sums(*(torch.zeros_like(x) for x in slots.sums))
        self.form: list[Tensor] | None = None
        """Keys' and values', `[n, G, S, D]` or with room for all. None: 0."""
        for own, given in zip(self.sums, last, strict=True):
            if given is not None:
                own[: len(given), :, : given.shape[2]] = given

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add what queries send back to the slots `[n, S, G, D]` they read; the tensors are taken over."""
        shares = [x.to(self.norm.weight.dtype).transpose(1, 2) for x in (keys, values)]
        if self.form is None:
            self.form = shares
            return
        for own, share in zip(self.form, shares, strict=True):
            own[: share.shape[0], :, : share.shape[2]] += share


def _with_shape(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` `[n, G, S, D]`, contiguous, with zeros behind where `like` has more sequences or slots."""
    if x.shape == like.shape:
        return x.contiguous()
    whole = x.new_zeros(like.shape)
    whole[: x.shape[0], :, : x.shape[2]] = x
    return whole


def _once(rows: Tensor, count: int) -> Tensor:
    """`[len(rows), 1]`, 1 for the first of equal rows (numbers below `count`), 0 for the others."""
    order = torch.arange(len(rows), device=rows.device)
    first = order.new_full((count,), len(rows)).scatter_reduce_(0, rows, order, "amin")
    return (first[rows] == order)[:, None]
