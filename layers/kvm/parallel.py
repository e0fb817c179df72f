"""The four steps of KVM attention for all chunks of a group at once, where launches are slow.

Only routing is sequential, and it needs the sums of keys alone. Once every token's slot is known, the sums
after all updates of the group are one running total, which is read and attended to as a whole; the backward
is a running total from the end.

Shapes: see `steps`; C tokens of a chunk, D head size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import full_precision, load_kernels, plain_forced
from ..errors import LayerError
from ..softmax import Part
from ..softmax.joined import Joint
from .attend import Backward, Inputs, Plan, attend, state_backward
from .chunks import Group
from .contributions import Norm, Sums, contributions, prepare, weights
from .routing import Choice, joined_choices
from .slots import Reading, Slots
from .spec import KVMSpec, Update
from .steps import Steps

WALKS = ("chunks", "torch", "triton")
"""Chunk by chunk; a group at once, routed by torch's operators; the same by kernels in Triton."""
_forced: ContextVar[str | None] = ContextVar("walk", default=None)


@contextmanager
def force_walk(name: str) -> Iterator[None]:
    """Run KVM attention inside this context, and later in its backward, by this one of WALKS or fail.

    The environment variable HYBRID_KVM_WALK does the same for the whole process.
    """
    if name not in WALKS:
        raise LayerError(f"there is no KVM walk {name!r}; there are: {', '.join(WALKS)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def choose_walk(k: Tensor, margins: bool = False) -> str:
    """Choose one of WALKS for keys `k`: the fastest that computes what is wanted."""
    if margins:
        return "chunks"  # the only one that reports them
    forced = _forced.get() or os.environ.get("HYBRID_KVM_WALK")
    if forced:
        if forced not in WALKS:
            raise LayerError(f"HYBRID_KVM_WALK is {forced!r}; allowed: {', '.join(WALKS)}")
        if forced == "triton" and _kernels() is None:
            raise LayerError("the KVM walk 'triton' is asked for, but triton is not installed")
    elif k.device.type != "cuda":
        return "chunks"
    else:
        forced = "torch" if plain_forced() or _kernels() is None else "triton"
    # The kernels do not compute in float64.
    return "torch" if forced == "triton" and k.dtype == torch.float64 else forced


def _kernels() -> tuple[Callable[..., Any], ...] | None:
    return load_kernels("triton", f"{__package__}.triton", "route_group", "States")


def walk_group(plan: Plan, x: Inputs, group: Group, slots: Slots, joint: Joint, q: Tensor) -> list[Choice]:
    """Take each of the four steps for all chunks of a group; arguments as of `walk.walk_chunks`."""
    steps, before = group.steps, slots.used()
    assert steps is not None
    tokens = x.entering(group).map(lambda t: t.transpose(1, 2))
    prepared = prepare(tokens.k, plan.spec.rotary_dim, x.norm)
    if plan.replay is None:
        routed = _functions(plan)[0](prepared, tokens.gate, before.keys, steps, plan.spec, x.norm)
        choice = Choice(*routed)
    else:
        choice = joined_choices([plan.replay.choice(update, prepared.shape[2]) for update in steps.updates])
    weight = weights(choice.founds, tokens.gate, steps.updates, plan.spec)
    added = contributions(prepared, tokens.v, weight, plan.spec)
    states = _functions(plan)[1](before, added, choice.slot, steps, plan.spec, x.norm)
    if steps.keys is not None:
        keys, values = states.read(x.k.dtype)
        attend(plan, joint, q, keys, values, [Part(group.readers, ragged=steps.keys)], x.state_bias)
    slots.replace(states.last())
    return [choice]


def walk_group_backward(
    b: Backward, added: Sums, slot: Tensor, slots: Slots, last: Sequence[Tensor | None]
) -> tuple[Sums, Sums]:
    """Take back at once what `walk_group` did; arguments as of `walk.walk_chunks_backward`."""
    steps = b.group.steps
    assert steps is not None
    states = _functions(b.plan)[1](slots.used(), added, slot, steps, b.plan.spec, b.x.norm)
    d_read = None
    if steps.keys is not None:
        keys, values = states.read(b.x.k.dtype)
        d_read = state_backward(b, b.group.readers, keys, values, [Part(ragged=steps.keys)])
    return states.backward(d_read, last, b.d.norm)


def _functions(plan: Plan) -> tuple[Callable[..., Any], ...]:
    """Give `route_group` and `States`, or those of the kernels."""
    kernels = _kernels() if plan.walk == "triton" else None
    return kernels or (route_group, States)


@torch.no_grad()
def route_group(
    keys: Tensor, gate: Tensor | None, before: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Decide on all tokens of a group, as `route` does on those of one update.

    Args:
        keys: prepared, `[R, G, C, D]`, in fp32 or wider; `gate`: merge gates `[R, G, C]`; None: all 1.
        before: sums of keys before the group, `[N, G, S0, D]`.

    Returns:
        Slots (int64) and whether the token was appended (bool), each `[R, G, C]`.
    """
    with full_precision(keys):
        return _routed(keys, gate, before, steps, spec, norm)


def _routed(
    keys: Tensor, gate: Tensor | None, before: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
) -> tuple[Tensor, Tensor]:
    router = _Router(keys, gate if spec.gate_keys else None, before, steps, spec, norm)
    found, row, last = [], 0, steps.updates[-1]
    form = norm(router.sums) if before.shape[2] else router.sums
    for update in steps.updates:
        rows = slice(row * keys.shape[1], (row + update.sequences) * keys.shape[1])
        found.append(router.take(update, rows, form, norm, gate))
        row += update.sequences
        if update is not last:
            form = norm(router.sums)
    slot = torch.cat(found).view(keys.shape[:3]) - steps.place[..., None]
    return slot, router.founds[:, 2:].bool().view(keys.shape[:3])


class _Router:
    """Sums of keys that grow update by update, and the buffers that decisions are made in.

    Columns of scores and of names: S slots; one that only zero gates choose, named like the first slot that
    merges; one that nobody chooses, where the running number of appended tokens begins; C tokens, as slots
    that they would found.
    """

    def __init__(
        self, keys: Tensor, gate: Tensor | None, before: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
    ) -> None:
        rows, heads, chunk, size = keys.shape
        self.spec, self.slots = spec, steps.slots
        self.sums = keys.new_zeros(steps.sequences, heads, steps.slots, size)
        self.sums[:, :, : before.shape[2]] = before[: steps.sequences]
        self.keys = keys.flatten(0, 1)
        self.merged = self.keys if gate is None else self.keys * gate.flatten(0, 1)[..., None]
        self.founders = self.merged if spec.gate_appends else self.keys
        self.zero = None if gate is None else gate.flatten(0, 1) == 0
        self.founds = torch.zeros(rows * heads, chunk + 2, dtype=torch.int64, device=keys.device)
        first = torch.arange(steps.sequences * heads, device=keys.device)[:, None] * steps.slots
        self.names = first + torch.arange(steps.slots, device=keys.device)
        if any(0 < update.after - update.before < chunk and update.number for update in steps.updates):
            self.names = F.pad(self.names, (0, chunk + 2))
            self.names[:, steps.slots] = self.names[:, spec.sinks]
            self.founds[:, 0] = 1
            self.founds[:, 1] = steps.start.flatten()
            self.scores = keys.new_full((len(self.names), chunk, steps.slots + chunk + 2), -torch.inf)
            self.fresh = F.pad(self.keys @ norm(self.founders).mT, (2, 0), value=-torch.inf)
            self.fresh.diagonal(2, 1, 2).fill_(torch.inf)  # an appended token's own slot is its best
            if self.zero is not None:
                self.fresh[..., 0].masked_fill_(self.zero, torch.finfo(keys.dtype).max)
            self.worst = keys.new_full((), -torch.inf)

    def take(self, update: Update, rows: slice, form: Tensor, norm: Norm, gate: Tensor | None) -> Tensor:
        """Route the `rows` of one update and add their keys; gives places among `[N, G, S]`, `[n * G, C]`."""
        sequences, before, appended = update.sequences, update.before, update.after - update.before
        heads, chunk = self.sums.shape[1], self.keys.shape[1]
        names = self.names[: sequences * heads]
        if update.number == 0 or appended == chunk:
            own = self.founders[rows]
            if update.number == 0:
                own = self.keys[rows]
                if gate is not None and self.spec.gate_initial:
                    own = own * gate.flatten(0, 1)[rows, :, None]
            self.sums[:sequences, :, before : update.after] = own.unflatten(0, (sequences, heads))
            self.founds[rows, 2:] = 1
            return names[:, before : update.after]
        old = form[:sequences].flatten(0, 1)[:, :before]
        if appended:
            place, added = self._with_appends(rows, old, names, appended)
        else:
            place = torch.bmm(self.keys[rows], old.mT)[..., self.spec.sinks :].max(-1).indices
            first = names[:, self.spec.sinks, None]
            place, added = place + first, self.merged[rows]
            if self.zero is not None:
                place = torch.where(self.zero[rows], first, place)
        self.sums.view(-1, self.sums.shape[-1]).index_add_(0, place.flatten(), added.flatten(0, 1))
        return place

    def _with_appends(self, rows: slice, old: Tensor, names: Tensor, appended: int) -> tuple[Tensor, Tensor]:
        """Choose among old slots and those that the most novel tokens found (see `routing`)."""
        count, before, _ = old.shape
        scores, sinks = self.scores[:count], self.spec.sinks
        torch.bmm(self.keys[rows], old.mT, out=scores[..., :before])
        # Stable: of equally novel tokens the earlier one is appended.
        order = scores[..., :before].amax(-1).sort(dim=-1, stable=True).indices
        founds = self.founds[rows]
        founds[:, 2:].scatter_(1, order[:, :appended], 1)
        torch.cumsum(founds[:, 1:], 1, out=names[:, self.slots + 1 :])
        founded = founds.bool()
        torch.where(founded[:, None], self.fresh[rows], self.worst, out=scores[..., self.slots :])
        place = names[:, sinks:].gather(1, scores[..., sinks:].max(-1).indices)
        if self.founders is self.merged:
            return place, self.merged[rows]
        return place, torch.where(founded[:, 2:, None], self.keys[rows], self.merged[rows])


class States:
    """Sums of slots after every update of a group, the form that queries meet them in, and the way back."""

    def __init__(
        self, before: Sums, added: Sums, slot: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
    ) -> None:
        """Add what tokens add, `added` `[R, G, C, ...]`, to their slots (`slot` `[R, G, C]`), from the sums
        `before` `[N, G, S0, ...]` on."""
        self.before, self.slot, self.steps, self.spec, self.norm = before, slot, steps, spec, norm
        place = steps.total[..., None] + slot
        own = place
        if spec.values == "reference_counts":  # each update adds 1 to every slot, of which there are C
            own = steps.total[..., None] + torch.arange(slot.shape[2], device=slot.device)
        made = []
        for first, new, where in zip(before, added, (place, place, own), strict=True):
            total = self._zeros(new)
            total[0, :, :, : first.shape[2]] = first[: steps.sequences]
            _flat(total).index_add_(0, where.flatten(), new.flatten(0, 2))
            made.append(total.cumsum_(0))
        self.sums = Sums(*made)

    def _zeros(self, like: Tensor) -> Tensor:
        steps, heads = self.steps, self.slot.shape[1]
        return like.new_zeros(len(steps.readers), steps.sequences, heads, steps.slots, like.shape[-1])

    def last(self) -> Sums:
        """Copy the sums after the last update, `[n, G, S, ...]`."""
        return Sums(*(x[-1, : self.steps.updates[-1].sequences].clone() for x in self.sums))

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute keys and values that queries meet, `[K, G, D]`."""
        rows = self.steps.read.flatten()
        self.reading = Reading(
            Sums(*(_flat(x).index_select(0, rows) for x in self.sums)), self.norm, self.spec
        )
        keys, values = (x.view(*self.steps.read.shape, -1) for x in self.reading.form(dtype)[:2])
        return keys, values

    def backward(
        self, read: tuple[Tensor, Tensor] | None, last: Sequence[Tensor | None], d_norm: Norm
    ) -> tuple[Sums, Sums]:
        """Return gradients of `before` and `added`; add to the norm's.

        `read`: gradients of what `read` gave, in at least fp32; `last`: of the last sums (None: 0).
        """
        steps, slot = self.steps, self.slot
        place = (steps.total_back[..., None] + slot).flatten()
        shares: Sequence[Tensor | None] = (None,) * 3
        if read is not None:
            shares = self.reading.backward(read[0].flatten(0, 1), read[1].flatten(0, 1), d_norm)
        d_before, d_added = [], []
        for first, share, after in zip(self.before, shares, last, strict=True):
            total = self._zeros(first)
            if share is not None:
                _flat(total).index_copy_(0, steps.read_back.flatten(), share)
            if after is not None:
                total[0, : len(after), :, : after.shape[2]] += after
            total.cumsum_(0)
            d_added.append(_flat(total).index_select(0, place).view(*slot.shape, -1))
            d_first = torch.zeros_like(first)
            d_first[: steps.sequences] = total[-1, :, :, : first.shape[2]]
            d_before.append(d_first)
        return Sums(*d_before), Sums(*d_added)


def _flat(x: Tensor) -> Tensor:
    """View `[U + 1, N, G, S, D]` as rows of D."""
    return x.view(-1, x.shape[-1])
