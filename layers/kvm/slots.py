"""Steps 2 and 3 of KVM attention, `accumulate` and `read`: the slots while chunk after chunk enters them.

`Slots` holds the sums of several sequences and their read form. An update adds its tokens in place, and reads
again only the slots it touched. `SlotGradients` goes the same way backwards: what queries send back to the
read form is kept there until the update that made it is taken back; then it goes through the reading to the
sums, where every token of the update finds its gradient in its slot. So both directions do work for the
tokens of a chunk, never for all slots of all chunks.

Shapes: N sequences, n of them in an update, R rows (chunks entering the
state, ordered by update, then by sequence), G key/value heads, C tokens of a chunk, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .routing import Norm, key_weight, value_weight
from .spec import KVMSpec, Update


class Sums(NamedTuple):
    """Keys, values and radii (or counts) of slots, `[..., S, D]` twice and `[..., S, 1]`, in at least fp32;
    also what single tokens add to them."""

    keys: Tensor
    values: Tensor
    radius: Tensor


def contributions(
    keys_RGCD: Tensor,
    values_RGCD: Tensor,
    gate_RGC: Tensor | None,
    founds_RGC: Tensor,
    steps: Sequence[Update],
    spec: KVMSpec,
) -> Sums:
    """What every token adds to its slot (spec sections 3 and 4); `keys` are prepared keys."""
    values_RGCD = values_RGCD.to(keys_RGCD.dtype)
    initial = steps[0].sequences if steps[0].number == 0 else 0
    append = any(step.number and step.after > step.before for step in steps)
    if initial in (0, len(keys_RGCD)):
        return _added(keys_RGCD, values_RGCD, gate_RGC, founds_RGC, initial == 0, append, spec)
    parts = []
    for rows, later in ((slice(0, initial), False), (slice(initial, None), True)):
        gate = None if gate_RGC is None else gate_RGC[rows]
        parts.append(_added(keys_RGCD[rows], values_RGCD[rows], gate, founds_RGC[rows], later, append, spec))
    return Sums(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _added(
    keys: Tensor,
    values: Tensor,
    gate: Tensor | None,
    founds: Tensor,
    later: bool,
    append: bool,
    spec: KVMSpec,
) -> Sums:
    """Of tokens that all enter by update 0, or `later` (where some may `append`)."""
    gated_keys = _times(keys, key_weight(spec, int(later), founds, gate))
    gated_values = _times(values, value_weight(spec, int(later), founds, gate))
    if spec.values != "radius":
        radius = torch.ones_like(values[..., :1])
    elif later and not append:
        radius = torch.zeros_like(values[..., :1])
    else:
        # Merges leave the radius alone. The initial state's is that of the ungated value.
        length = torch.linalg.vector_norm(gated_values if later else values, dim=-1, keepdim=True)
        radius = length * founds[..., None]
    return Sums(gated_keys, gated_values, radius)


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight[..., None]


DENSE = 2
"""Up to so many chunks of slots an update is taken to change all of them: plain copies are faster than picked
rows."""


class Places(NamedTuple):
    """Where one update goes: rows of flat slots, for its tokens in the order `[n, C, G]`."""

    tokens: Tensor
    radius: Tensor
    """Where each token's radius is added."""
    box: tuple[slice, slice, slice]
    """The slots `[n, G, S]` there are."""
    dense: bool
    """Whether all of them may change; else those that get tokens."""

    def of(self, field: int) -> Tensor:
        """Where field number `field` of the tokens' `Sums` is added."""
        return self.radius if field == 2 else self.tokens

    def take(self, x: Tensor) -> Tensor:
        """What may change, of `[N, G, S, ...]`: a view, or rows, of which some may be the same slot's."""
        return x[self.box] if self.dense else _flat(x).index_select(0, self.tokens)

    def clear(self, x: Tensor) -> None:
        """Set it to 0."""
        if self.dense:
            x[self.box] = 0
        else:
            _flat(x).index_fill_(0, self.tokens, 0)

    def put(self, x: Tensor, new: Tensor) -> None:
        """Set what `take` took."""
        if self.dense:
            x[self.box] = new
        else:
            _flat(x).index_copy_(0, self.tokens, new)


def places(slot_nGC: Tensor, step: Update, size: int, spec: KVMSpec) -> Places:
    """Places of tokens that go to the given slots in `step`; tensors have room for `size` slots a head."""
    sequences, heads, chunk = slot_nGC.shape
    first = torch.arange(sequences * heads, device=slot_nGC.device).view(sequences, 1, heads) * size
    tokens = radius = (slot_nGC.transpose(1, 2) + first).flatten()
    if spec.values == "reference_counts":
        # The public code's rule: each update adds 1 to every slot, of which there are as many as tokens.
        radius = (torch.arange(chunk, device=slot_nGC.device)[:, None] + first).flatten()
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
    for field, (old, new) in enumerate(zip(before, added, strict=True)):
        grown = old.new_zeros(*old.shape[:2], step.after - old.shape[2], old.shape[3])
        sums = torch.cat((old, grown), 2)
        after.append(sums.flatten(0, 2).index_add(0, at.of(field), token_rows(new)).view(sums.shape))
    return Sums(*after)


def read(sums: Sums, norm: Norm, spec: KVMSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[..., S, D]` that queries meet, in `dtype`; computed in the sums' own precision."""
    keys = norm(sums.keys)
    if spec.values == "radius":
        length = torch.linalg.vector_norm(sums.values, dim=-1, keepdim=True)
        values = sums.values * (sums.radius / length.clamp_min(1e-12))
    else:
        values = sums.values / sums.radius.clamp_min(1)  # a slot that exists counts at least 1
    return keys.to(dtype), values.to(dtype)


class Slots:
    """Slots of N sequences, changed in place; updates are made for the first n of them."""

    def __init__(
        self, shape: tuple[int, int, int, int], norm: Norm, spec: KVMSpec, dtype: torch.dtype
    ) -> None:
        """`shape`: N, G, the most slots there will be, D; `dtype`: of the read form."""
        like, wide = norm.weight, (*shape[:3], 1)
        self.norm, self.spec = norm, spec
        self.sums = Sums(like.new_zeros(shape), like.new_zeros(shape), like.new_zeros(wide))
        self.keys = like.new_zeros(shape, dtype=dtype)
        self.values = torch.zeros_like(self.keys)

    def start(self, sums: Sums, most: int) -> None:
        """Take over sums `[n, G, S, ...]`; further slots, up to `most`, are empty."""
        sequences, _, held, _ = sums.keys.shape
        for own, given in zip(self.sums, sums, strict=True):
            own[:sequences, :, :held] = given
            own[:sequences, :, held:most] = 0

    def read_all(self, sequences: int, slots: int) -> None:
        """Bring the read form up to date."""
        box = (slice(0, sequences), slice(None), slice(0, slots))
        made = self._readable(Sums(*(x[box] for x in self.sums)))
        self.keys[box], self.values[box] = made

    def copy(self, sequences: int, slots: int) -> Sums:
        """The sums of the first sequences."""
        return Sums(*(x[:sequences, :, :slots].clone() for x in self.sums))

    def readable(self, sequences: int, slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, `[n, S, G, D]`; views."""
        keys, values = (x[:sequences, :, :slots].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values

    def update(self, added: Sums, at: Places) -> None:
        """Add what tokens add, `[n, G, C, ...]`."""
        self._add(added, at)
        self._read(at, self.held(at))

    def _add(self, added: Sums, at: Places) -> None:
        for field, (sums, new) in enumerate(zip(self.sums, added, strict=True)):
            _flat(sums).index_add_(0, at.of(field), token_rows(new))

    def held(self, at: Places) -> Sums:
        """The sums that an update may change; they may be views."""
        return Sums(*(at.take(x) for x in self.sums))

    def advance(self, added: Sums, at: Places) -> Sums:
        """As `update`, leaving the read form as it was; returns what `restore` needs to undo it."""
        held = self.held(at)
        if at.dense:
            held = Sums(*(x.clone() for x in held))
        self._add(added, at)
        return held

    def restore(self, at: Places, held: Sums) -> None:
        """Undo an update; `held`: what `advance` returned."""
        for sums, old in zip(self.sums, held, strict=True):
            at.put(sums, old)
        self._read(at, held)

    def _read(self, at: Places, sums: Sums) -> None:
        for own, made in zip((self.keys, self.values), self._readable(sums), strict=True):
            at.put(own, made)

    def _readable(self, sums: Sums) -> tuple[Tensor, Tensor]:
        return read(sums, self.norm, self.spec, self.keys.dtype)


class SlotGradients:
    """Gradients of slots: of their sums, and of their read form as it is now."""

    def __init__(self, slots: Slots, last: Sums | None, d_norm: Norm) -> None:
        """`last`: gradients of the sums as they are now; `d_norm`: receives the norm's."""
        self.slots, self.d_norm = slots, d_norm
        self.sums = Sums(*(torch.zeros_like(x) for x in slots.sums))
        self.keys, self.values = (torch.zeros_like(x) for x in self.sums[:2])
        if last is not None:
            for own, given in zip(self.sums, last, strict=True):
                own[: len(given), :, : given.shape[2]] = given

    def add(self, keys: Tensor, values: Tensor) -> None:
        """What queries send back to the slots `[n, S, G, D]` they read."""
        for own, share in zip((self.keys, self.values), (keys, values), strict=True):
            own[: len(share), :, : share.shape[1]] += share.transpose(1, 2)

    def take_back(self, at: Places, now: Sums, out: Sums) -> None:
        """Write gradients of what an update's tokens added to `out`, rows in the order `[n, C, G]`.

        `now`: the sums it may have changed. The read form's gradients are then those of the form before.
        """
        slopes = [at.take(x) for x in (self.keys, self.values)]
        if not at.dense:
            once = _once(at.tokens, self.keys[..., 0].numel())
            slopes = [x * once for x in slopes]
        shares = self._through_reading(slopes, now)
        for sums, share in zip(self.sums, shares, strict=True):
            if at.dense:
                sums[at.box] += share
            else:
                _flat(sums).index_add_(0, at.tokens, share)
        for x in (self.keys, self.values):
            at.clear(x)
        for field, (sums, own) in enumerate(zip(self.sums, out, strict=True)):
            torch.index_select(_flat(sums), 0, at.of(field), out=own)

    def first(self, like: Sums) -> Sums:
        """Gradients of the sums before the first update, `like`, all updates being taken back."""
        shares = self._through_reading([self.keys, self.values], self.slots.sums)
        return Sums(*((x + y)[:, :, : z.shape[2]] for x, y, z in zip(self.sums, shares, like, strict=True)))

    def _through_reading(self, slopes: list[Tensor], sums: Sums) -> Sums:
        """Gradients of the sums whose read form has gradients `slopes`; adds to the norm's."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (*sums, *self.slots.norm)]
            made = read(Sums(*leaves[:3]), Norm(*leaves[3:]), self.slots.spec, leaves[0].dtype)
        *found, d_weight, d_bias = torch.autograd.grad(made, leaves, slopes)
        self.d_norm.weight.add_(d_weight)
        self.d_norm.bias.add_(d_bias)
        return Sums(*found)


def _once(rows: Tensor, count: int) -> Tensor:
    """`[len(rows), 1]`, 1 for the first of equal rows (numbers below `count`), 0 for the others."""
    order = torch.arange(len(rows), device=rows.device)
    first = order.new_full((count,), len(rows)).scatter_reduce_(0, rows, order, "amin")
    return (first[rows] == order)[:, None]
