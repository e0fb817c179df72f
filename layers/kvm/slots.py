"""Steps 2 and 3 of KVM attention, `accumulate` and `read`: the slots while chunk after chunk enters them.

`Slots` holds the sums of several sequences and their read form. An update adds its tokens in place, and reads
again only the slots it may have changed. `SlotGradients` goes the same way backwards: what queries send back
to the read form is kept there until the update that made it is taken back; then it goes through the reading
to the sums, where every token of the update finds its gradient in its slot. So where there are many slots,
both directions do work for the tokens of a chunk, never for all slots of all chunks.

Shapes: N sequences, n of them in an update, G key/value heads, C tokens of a chunk, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .contributions import TINY, Norm, Normed, Sums
from .spec import KVMSpec, Update

DENSE = 2
"""Up to so many chunks of slots an update is taken to change all of them: whole tensors are faster than
picked rows."""


class Places(NamedTuple):
    """Where one update goes: rows of flat slots, for its tokens in the order `[n, C, G]`."""

    tokens: Tensor
    radius: Tensor | None
    """Where each token's radius is added; None: none changes."""
    box: tuple[slice, slice, slice]
    """The slots `[n, G, S]` there are."""
    dense: bool
    """Whether all of them may change; else those that get tokens."""

    def fields(self) -> Iterator[tuple[int, Tensor]]:
        """Which fields of `Sums` change, and where the tokens' are added."""
        yield from ((0, self.tokens), (1, self.tokens))
        if self.radius is not None:
            yield 2, self.radius

    def take(self, x: Tensor) -> Tensor:
        """What may change, of `[N, G, S, ...]`: a view, or rows, of which some may be the same slot's."""
        return x[self.box] if self.dense else _flat(x).index_select(0, self.tokens)

    def copy(self, x: Tensor) -> Tensor:
        """The same, as it is now."""
        return x[self.box].clone() if self.dense else self.take(x)


def places(slot_nGC: Tensor, step: Update, size: int, spec: KVMSpec) -> Places:
    """Places of tokens that go to the given slots in `step`; tensors have room for `size` slots a head."""
    sequences, heads, chunk = slot_nGC.shape
    first = torch.arange(sequences * heads, device=slot_nGC.device).view(sequences, 1, heads) * size
    tokens = (slot_nGC.transpose(1, 2) + first).flatten()
    radius: Tensor | None = tokens
    if spec.values == "reference_counts":
        # The public code's rule: each update adds 1 to every slot, of which there are as many as tokens.
        radius = (torch.arange(chunk, device=slot_nGC.device)[:, None] + first).flatten()
    elif spec.values == "radius" and step.number and step.after == step.before:
        radius = None
    box = (slice(0, sequences), slice(None), slice(0, step.after))
    return Places(tokens, radius, box, step.after <= DENSE * chunk)


def _flat(x: Tensor) -> Tensor:
    """`[N, G, S, ...]` as rows `[N * G * S, ...]`; a view."""
    return x.view(-1, x.shape[-1])


def token_rows(x: Tensor) -> Tensor:
    """`[n, G, C, ...]` to rows in the order `[n, C, G]`, which keys and values have in memory."""
    return x.transpose(1, 2).flatten(0, 2)


def absorbed(before: Sums, added: Sums, slot_nGC: Tensor, step: Update, spec: KVMSpec) -> Sums:
    """New slots `[n, G, S, ...]` after one update, the old ones left alone; differentiable."""
    at = places(slot_nGC, step, step.after, spec)
    after = []
    for old in before:
        grown = old.new_zeros(*old.shape[:2], step.after - old.shape[2], old.shape[3])
        after.append(torch.cat((old, grown), 2))
    for field, rows in at.fields():
        sums = after[field]
        after[field] = sums.flatten(0, 2).index_add(0, rows, token_rows(added[field])).view(sums.shape)
    return Sums(*after)


def read(sums: Sums, norm: Norm, spec: KVMSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., S, D]` that queries meet, in `dtype`; computed in the sums' own precision."""
    values = sums.values * _value_scale(sums, _length(sums, spec))
    return norm(sums.keys).to(dtype), values.to(dtype)


def _length(sums: Sums, spec: KVMSpec) -> Tensor | None:
    """Of summed values, `[..., S, 1]`, where they are brought to a radius."""
    return torch.linalg.vector_norm(sums.values, dim=-1, keepdim=True) if spec.values == "radius" else None


def _value_scale(sums: Sums, length: Tensor | None) -> Tensor:
    if length is None:
        return sums.radius.clamp_min(1).reciprocal()  # a slot that exists counts at least 1
    return sums.radius / length.clamp_min(TINY)


class Reading:
    """Slots in read form, `[..., S, D]` in the sums' precision, and the way back to the sums."""

    def __init__(self, sums: Sums, norm: Norm, spec: KVMSpec) -> None:
        self.sums = sums
        self.length = _length(sums, spec)
        self.scale = _value_scale(sums, self.length)
        self.normed = Normed(sums.keys, norm)
        self.keys = self.normed.out
        self.values = sums.values * self.scale

    def backward(self, d_keys: Tensor, d_values: Tensor, d_norm: Norm) -> Sums:
        """Gradients of the sums; adds to the norm's. Counts have none, as they depend on nothing."""
        sums, to_keys = self.sums, self.normed.backward(d_keys, d_norm)
        to_values = d_values * self.scale
        if self.length is None:
            return Sums(to_keys, to_values, torch.zeros_like(sums.radius))
        along = torch.linalg.vecdot(sums.values, d_values)[..., None] / self.length.clamp_min(TINY)
        # A longer sum is scaled down by as much.
        shrinking = along * self.scale / self.length.clamp_min(TINY) * (self.length >= TINY)
        return Sums(to_keys, to_values.addcmul_(sums.values, shrinking, value=-1), along)


class Change(NamedTuple):
    """What an update made of the slots it may have changed, and what they were in read form before."""

    made: Reading
    before: list[Tensor] | None
    whole: bool
    """Whether `before` is the whole read form (None: it was not read), or rows of it."""


class Slots:
    """Slots of N sequences; updates are made for the first n of them."""

    def __init__(
        self, shape: tuple[int, int, int, int], norm: Norm, spec: KVMSpec, dtype: torch.dtype
    ) -> None:
        """`shape`: N, G, the most slots there will be, D; `dtype`: of the read form that queries meet."""
        like, wide = norm.weight, (*shape[:3], 1)
        self.norm, self.spec, self.dtype = norm, spec, dtype
        self.sums = Sums(like.new_zeros(shape), like.new_zeros(shape), like.new_zeros(wide))
        self._rows = [
            torch.zeros_like(x, dtype=t) for x, t in zip(self.sums[:2], (dtype, dtype), strict=True)
        ]
        if dtype != like.dtype:
            self._rows.append(torch.zeros_like(self.sums.keys))
        self.form: list[Tensor] | None = self._rows
        """Keys and values that queries meet and, where these are narrower than the sums, the keys in full,
        which routing needs: `_rows`, which have room for all, or what the last update made. None: not read
        yet since the start."""
        self._started = (slice(0, 0), slice(None), slice(0, 0))

    def start(self, sums: Sums, most: int) -> None:
        """Take over sums `[n, G, S, ...]`; further slots, up to `most`, are empty."""
        sequences, _, held, _ = sums.keys.shape
        for own, given in zip(self.sums, sums, strict=True):
            own[:sequences, :, :held] = given
            own[:sequences, :, held:most] = 0
        self.form = None
        self._started = (slice(0, sequences), slice(None), slice(0, held))

    def copy(self, sequences: int, slots: int) -> Sums:
        """The sums of the first sequences."""
        return Sums(*(x[:sequences, :, :slots].clone() for x in self.sums))

    def readable(self, sequences: int, slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, `[n, S, G, D]`; views."""
        keys, values = (x[:sequences, :, :slots].transpose(1, 2) for x in self._form()[:2])
        return keys, values

    def routable(self, sequences: int, slots: int) -> Tensor:
        """Keys to choose from, `[n, G, S, D]`, in the sums' precision; a view."""
        form = self._form()
        return form[0 if len(form) == 2 else 2][:sequences, :, :slots]

    def update(self, added: Sums, at: Places) -> None:
        """Add what tokens add, `[n, G, C, ...]`, and bring the read form up to date."""
        if not at.dense:
            self._settle()
        self._add(added, at)
        self._set(Reading(Sums(*(at.take(x) for x in self.sums)), self.norm, self.spec), at)

    def advance(self, added: Sums, at: Places) -> Change:
        """As `update`; returns what it takes to go back."""
        whole = at.dense or self.form is not self._rows
        before = self.form
        if not at.dense:
            self._settle()
            before = before if whole else [at.copy(x) for x in self._rows]
        self._add(added, at)
        reading = Reading(Sums(*(at.copy(x) for x in self.sums)), self.norm, self.spec)
        self._set(reading, at)
        return Change(reading, before, whole)

    def _add(self, added: Sums, at: Places) -> None:
        for field, rows in at.fields():
            _flat(self.sums[field]).index_add_(0, rows, token_rows(added[field]))

    def _set(self, reading: Reading, at: Places) -> None:
        if at.dense:
            self.form = self._made(reading)
        else:
            self._put(at, self._made(reading))

    def restore(self, change: Change, at: Places) -> None:
        """Undo what an update did to the read form."""
        if change.whole:
            self.form = change.before
        elif change.before is not None:
            self._put(at, change.before)

    def _form(self) -> list[Tensor]:
        if self.form is None:
            self._settle()
        return self.form if self.form is not None else self._rows

    def _made(self, reading: Reading) -> list[Tensor]:
        made = [reading.keys.to(self.dtype), reading.values.to(self.dtype)]
        return made if len(self._rows) == 2 else [*made, reading.keys]

    def _settle(self) -> None:
        """Keep the read form where rows can be put."""
        if self.form is None:
            held = Sums(*(x[self._started] for x in self.sums))
            for rows, made in zip(self._rows, self._made(Reading(held, self.norm, self.spec)), strict=True):
                rows[self._started] = made
        elif self.form is not self._rows:
            for rows, own in zip(self._rows, self.form, strict=True):
                rows[: own.shape[0], :, : own.shape[2]] = own
        self.form = self._rows

    def _put(self, at: Places, made: list[Tensor]) -> None:
        for own, rows in zip(self._rows, made, strict=True):
            _flat(own).index_copy_(0, at.tokens, rows)


class SlotGradients:
    """Gradients of slots: of their sums, and of their read form as it is now."""

    def __init__(self, slots: Slots, last: Sums | None, d_norm: Norm) -> None:
        """`last`: gradients of the sums as they are now; `d_norm`: receives the norm's."""
        self.slots, self.d_norm = slots, d_norm
        self.sums = Sums(*(torch.zeros_like(x) for x in slots.sums))
        self.form: list[Tensor] | None = None
        """Keys' and values', `[n, G, S, D]`. None: 0."""
        if last is not None:
            for own, given in zip(self.sums, last, strict=True):
                own[: len(given), :, : given.shape[2]] = given

    def add(self, keys: Tensor, values: Tensor) -> None:
        """What queries send back to the slots `[n, S, G, D]` they read; the tensors are taken over."""
        shares = [x.to(self.d_norm.weight.dtype).transpose(1, 2) for x in (keys, values)]
        if self.form is None:
            self.form = shares
            return
        for own, share in zip(self.form, shares, strict=True):
            own[: share.shape[0], :, : share.shape[2]] += share

    def take_back(self, change: Change, at: Places, out: Sums) -> None:
        """Write gradients of what an update's tokens added to `out`, rows in the order `[n, C, G]`.

        The read form's gradients are then those of the form before.
        """
        if self.form is not None and at.dense:
            d_keys, d_values = (x[at.box] for x in self._form_of(at.box[0].stop, at.box[2].stop))
            shares = change.made.backward(d_keys, d_values, self.d_norm)
            for sums, share in zip(self.sums, shares, strict=True):
                sums[at.box] += share
            self.form = None
        elif self.form is not None:
            sequences, _, slots, _ = self.sums.keys.shape
            self.form = [x.contiguous() for x in self._form_of(sequences, slots)]
            once = _once(at.tokens, sequences * self.sums.keys.shape[1] * slots)
            d_keys, d_values = (_flat(x).index_select(0, at.tokens).mul_(once) for x in self.form)
            shares = change.made.backward(d_keys, d_values, self.d_norm)
            for sums, share in zip(self.sums, shares, strict=True):
                _flat(sums).index_add_(0, at.tokens, share)
            for x in self.form:
                _flat(x).index_fill_(0, at.tokens, 0)
        for field, places in at.fields():
            torch.index_select(_flat(self.sums[field]), 0, places, out=out[field])

    def _form_of(self, sequences: int, slots: int) -> list[Tensor]:
        """The read form's gradients, with room for so many."""
        assert self.form is not None
        held = self.form[0].shape
        if held[0] >= sequences and held[2] >= slots:
            return self.form
        whole = [torch.zeros_like(x) for x in self.sums[:2]]
        for own, given in zip(whole, self.form, strict=True):
            own[: held[0], :, : held[2]] = given
        return whole

    def first(self, before: Sums) -> Sums:
        """Gradients of the sums before the first update, all updates being taken back."""
        box = tuple(slice(0, size) for size in before.keys.shape[:3])
        found = Sums(*(x[box] for x in self.sums))
        if self.form is None:
            return found
        reading = Reading(before, self.slots.norm, self.slots.spec)
        d_keys, d_values = (x[box] for x in self._form_of(box[0].stop, box[2].stop))
        shares = reading.backward(d_keys, d_values, self.d_norm)
        return Sums(*(x + y for x, y in zip(found, shares, strict=True)))


def _once(rows: Tensor, count: int) -> Tensor:
    """`[len(rows), 1]`, 1 for the first of equal rows (numbers below `count`), 0 for the others."""
    order = torch.arange(len(rows), device=rows.device)
    first = order.new_full((count,), len(rows)).scatter_reduce_(0, rows, order, "amin")
    return (first[rows] == order)[:, None]
