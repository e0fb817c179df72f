"""Sums of slots after every update of a group, read for those who read them, and the way back.

A program walks the updates with a block of slots of one sequence and head. Tokens are sorted by slot, so that
it finds its own; it adds them in time order, and no other program writes where it does. So results are the
same in every run. Keys and values take a launch each, as they are read by rules of their own.

Shapes: R rows (chunks entering the state, ordered by update, then by sequence), N sequences, G key/value
heads, C tokens of a chunk, S slots, D head size, K slots read (see `..steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..contributions import Norm, Sums
from ..spec import VALUE_RULES, KVMSpec
from .common import PRECISION, SHORTEST, padded, standardised

if TYPE_CHECKING:
    from ..steps import Steps

SLOTS = 16
"""Slots of a program."""
TOKENS = tl.constexpr(16)
"""Tokens that it adds at once."""
WARPS = 4
KEYS, RADIUS, COUNTS, REFERENCE_COUNTS = (tl.constexpr(rule) for rule in range(4))
"""How sums are read: keys by LayerNorm, values by one of `VALUE_RULES`."""


def read_group(
    before: Sums, added: Sums, slot: Tensor, steps: Steps, spec: KVMSpec, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Sums]:
    """Add tokens to their slots, update by update, and read the states that have readers.

    Args:
        before: sums before the group, fp32 `[N, G, S0, ...]`; S0 may be 0.
        added: what every token adds, fp32 `[R, G, C, ...]`; `slot`: to which slot, int64 `[R, G, C]`.
        dtype: of what is read.

    Returns:
        Keys and values that queries meet, `[K, G, D]`, and the sums after the last update, `[n, G, S, ...]`.
    """
    group = _Group(before, added, slot, steps, spec, norm)
    _, heads, _, size = before.keys.shape
    slots = [steps.updates[0].before, *(update.after for update in steps.updates)]
    read = sum(readers * count for readers, count in zip(steps.readers, slots, strict=True))
    keys, values = slot.new_empty(2, read, heads, size, dtype=dtype)
    last = Sums(*(x.new_empty(steps.updates[-1].sequences, heads, slots[-1], x.shape[3]) for x in before))
    for place, out in enumerate((keys, values)):
        read_kernel[group.programs](
            *group.tensors(place), out, last[place], last.radius, *group.numbers(place), num_warps=WARPS
        )
    return keys, values, last


def read_group_backward(
    before: Sums,
    added: Sums,
    slot: Tensor,
    steps: Steps,
    spec: KVMSpec,
    norm: Norm,
    d_keys: Tensor,
    d_values: Tensor,
    d_last: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Sums, Sums, Norm]:
    """Return gradients of `before`, of `added` and of the norm, in fp32.

    Args:
        d_keys, d_values: gradients of the keys and values read, `[K, G, D]`.
        d_last: gradients of the sums after the last update; None: 0.

    The other arguments are those of `read_group`, whose sums are made again.
    """
    group = _Group(before, added, slot, steps, spec, norm)
    d_before, d_added = (Sums(*(torch.empty_like(x) for x in sums)) for sums in (group.before, group.added))
    d_norm = norm.weight.new_empty(2, *group.programs, *norm.weight.shape)
    last = [x if d is None else d.contiguous() for d, x in zip(d_last, group.before, strict=True)]
    for place, d_form in enumerate((d_keys, d_values)):
        read_backward_kernel[group.programs](
            *group.tensors(place), d_form.contiguous(), last[place], last[2],
            d_before[place], d_before.radius, d_added[place], d_added.radius, *d_norm,
            *group.numbers(place), d_last[place] is not None, d_last[2] is not None, num_warps=WARPS,
        )  # fmt: skip
    return d_before, d_added, Norm(*d_norm.sum((1, 2)))


class _Group:
    """The arguments that both kernels take, of keys (`place` 0) or values (1)."""

    def __init__(
        self, before: Sums, added: Sums, slot: Tensor, steps: Steps, spec: KVMSpec, norm: Norm
    ) -> None:
        assert all(x.dtype == torch.float32 for x in (*before, *added))
        self.before = Sums(*(x.contiguous() for x in before))
        self.added = Sums(_dense(added.keys), _dense(added.values), added.radius.contiguous())
        self.shared = *slot.sort(dim=-1, stable=True), *norm, steps.table
        sequences, heads, held, size = before.keys.shape
        slots, chunk = steps.updates[-1].after, slot.shape[2]
        self.programs = sequences * heads, triton.cdiv(slots, SLOTS)
        self.counts = len(steps.updates), slots, held, heads
        self.sizes = chunk, padded(chunk, 1), size, padded(size), SLOTS
        self.rule = RADIUS.value + VALUE_RULES.index(spec.values)

    def tensors(self, place: int) -> list[Tensor]:
        before, added = self.before, self.added
        return [before[place], before.radius, added[place], added.radius, *self.shared]

    def numbers(self, place: int) -> list[Any]:
        strides = self.added[place].stride()[:3]
        return [*self.counts, *strides, *self.sizes, self.rule if place else KEYS.value]


def _dense(x: Tensor) -> Tensor:
    """Return a tensor whose strides `empty_like` takes over, the last of them 1."""
    return x if x.stride(-1) == 1 and x.stride() == torch.empty_like(x).stride() else x.contiguous()


@triton.jit(do_not_specialize=["updates", "slots", "held"])
def read_kernel(
    before, before_radius, added, added_radius, sorted_slot, token, weight, bias, table,
    out, last, last_radius,
    updates, slots, held, heads, row_stride, head_stride, token_stride,
    chunk: tl.constexpr, padded_chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, rule: tl.constexpr,
):  # fmt: skip
    """Walk the updates with a block of slots; `sorted_slot` `[R, G, C]`: slots of `token` `[R, G, C]`."""
    pid = tl.program_id(0)
    n, g = pid // heads, pid % heads
    s = tl.program_id(1) * block + tl.arange(0, block)
    x, radius = _load(before, before_radius, pid, held, s, size, columns, rule)
    count = _count(table, n, updates)
    for h in range(0, count + 1):
        entry = table + h * 5
        if h > 0:
            row = (tl.load(entry) + n).to(tl.int64)
            at, rows = (row * heads + g) * chunk, row * row_stride + g * head_stride
            x, radius = _add(
                x, radius, s, at, rows, added, added_radius, sorted_slot, token, added, token_stride,
                chunk, padded_chunk, size, columns, block, rule, False,
            )  # fmt: skip
        if n < tl.load(entry + 3):
            places, valid = _read_places(entry, n, g, s, heads, size, columns)
            form = _form(x, radius, weight, bias, size, columns, rule)
            tl.store(out + places, form.to(out.dtype.element_ty), valid)
    if count == updates:
        _store(last, last_radius, pid, slots, s, x, radius, size, columns, rule)


@triton.jit(do_not_specialize=["updates", "slots", "held"])
def read_backward_kernel(
    before, before_radius, added, added_radius, sorted_slot, token, weight, bias, table,
    d_form, d_last, d_last_radius, d_before, d_before_radius, d_added, d_added_radius, d_weight, d_bias,
    updates, slots, held, heads, row_stride, head_stride, token_stride,
    chunk: tl.constexpr, padded_chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, rule: tl.constexpr, has_last: tl.constexpr, has_last_radius: tl.constexpr,
):  # fmt: skip
    """Walk the updates forward, as `read_kernel` does, and back.

    Forward, each token's row of `d_added` keeps the sums of its slot from before; back, it yields them, so
    that the sums are those of the forward to the bit, and takes its gradient.
    """
    pid = tl.program_id(0)
    n, g = pid // heads, pid % heads
    s = tl.program_id(1) * block + tl.arange(0, block)
    x, radius = _load(before, before_radius, pid, held, s, size, columns, rule)
    count = _count(table, n, updates)
    for h in range(1, count + 1):
        row = (tl.load(table + h * 5) + n).to(tl.int64)
        at, rows = (row * heads + g) * chunk, row * row_stride + g * head_stride
        x, radius = _add(
            x, radius, s, at, rows, added, added_radius, sorted_slot, token, d_added, token_stride,
            chunk, padded_chunk, size, columns, block, rule, True,
        )  # fmt: skip
    tl.debug_barrier()
    d_x, d_radius = tl.zeros([block, columns], tl.float32), tl.zeros([block], tl.float32)
    if count == updates:
        if has_last:
            d_x, _ = _load(d_last, d_last, pid, slots, s, size, columns, KEYS)
        if has_last_radius:
            d_radius = tl.load(d_last_radius + pid.to(tl.int64) * slots + s, s < slots, 0.0)
    own_weight, own_bias = tl.zeros([columns], tl.float32), tl.zeros([columns], tl.float32)
    for back in range(0, count + 1):
        entry = table + (count - back) * 5
        if n < tl.load(entry + 3):
            places, valid = _read_places(entry, n, g, s, heads, size, columns)
            d_read = tl.load(d_form + places, valid, 0.0).to(tl.float32)
            if rule == KEYS:
                standard, to_x = _norm_backward(x, d_read, weight, size, columns)
                own_weight += tl.sum(d_read * standard, 0)
                own_bias += tl.sum(d_read, 0)
            else:
                to_x, to_radius = _scale_backward(x, radius, d_read, rule)
                d_radius += to_radius
            d_x += to_x
        if back < count:
            row = (tl.load(entry) + n).to(tl.int64)
            at, rows = (row * heads + g) * chunk, row * row_stride + g * head_stride
            x, radius = _take_back(
                x, radius, d_x, d_radius, s, at, rows, added_radius, sorted_slot, token, d_added,
                d_added_radius, token_stride, chunk, padded_chunk, size, columns, block, rule,
            )  # fmt: skip
    _store(d_before, d_before_radius, pid, held, s, d_x, d_radius, size, columns, rule)
    if rule == KEYS:
        d = tl.arange(0, columns)
        own = (pid * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * size + d
        tl.store(d_weight + own, own_weight, d < size)
        tl.store(d_bias + own, own_bias, d < size)


@triton.jit
def _count(table, n, updates):
    """Count the updates of a sequence."""
    count = 0
    for u in range(1, updates + 1):
        count += (n < tl.load(table + u * 5 + 1)).to(tl.int32)
    return count


@triton.jit
def _load(
    sums, radii, pid, room, s, size: tl.constexpr, columns: tl.constexpr, rule: tl.constexpr
):  # fmt: skip
    """Load slots `s` of `[N, G, room, ...]`, 0 beyond; keys have no radii."""
    d = tl.arange(0, columns)[None, :]
    at = pid.to(tl.int64) * room + s
    radius = tl.zeros(s.shape, tl.float32)
    if rule != KEYS:
        radius = tl.load(radii + at, s < room, 0.0)
    return tl.load(sums + at[:, None] * size + d, (s < room)[:, None] & (d < size), 0.0), radius


@triton.jit
def _store(
    sums, radii, pid, room, s, x, radius, size: tl.constexpr, columns: tl.constexpr, rule: tl.constexpr
):  # fmt: skip
    """Store slots `s` in `[N, G, room, ...]`."""
    d = tl.arange(0, columns)[None, :]
    at = pid.to(tl.int64) * room + s
    tl.store(sums + at[:, None] * size + d, x, (s < room)[:, None] & (d < size))
    if rule != KEYS:
        tl.store(radii + at, radius, s < room)


@triton.jit
def _read_places(entry, n, g, s, heads, size: tl.constexpr, columns: tl.constexpr):
    """Find slots `s` of a state in `[K, G, D]`, and which of them it has."""
    d = tl.arange(0, columns)[None, :]
    known = tl.load(entry + 2)
    at = ((tl.load(entry + 4) + n * known + s).to(tl.int64) * heads + g)[:, None] * size + d
    return at, (s < known)[:, None] & (d < size)


@triton.jit
def _own_tokens(sorted_slot, at, s, chunk: tl.constexpr, padded_chunk: tl.constexpr, block: tl.constexpr):
    """Find where the tokens that go to slots `s` start and end in a row."""
    t = tl.arange(0, padded_chunk)
    slot, first = tl.load(sorted_slot + at + t, t < chunk, 2147483647), tl.min(s, 0)
    return tl.sum((slot < first).to(tl.int32), 0), tl.sum((slot < first + block).to(tl.int32), 0)


@triton.jit
def _add(
    x, radius, s, at, rows, added, added_radius, sorted_slot, token, old, token_stride,
    chunk: tl.constexpr, padded_chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, rule: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """Add the tokens of a row to slots `s`; `keep`: leave the sums before in the tokens' rows of `old`."""
    d = tl.arange(0, columns)[None, :]
    start, end = _own_tokens(sorted_slot, at, s, chunk, padded_chunk, block)
    for first in range(start, end, TOKENS):
        i = first + tl.arange(0, TOKENS)
        t, slot = tl.load(token + at + i, i < end, 0), tl.load(sorted_slot + at + i, i < end, -1)
        goes = slot[None, :] == s[:, None]
        own, valid = rows + t[:, None] * token_stride + d, (i < end)[:, None] & (d < size)
        if keep:
            tl.store(old + own, _of_slots(x, slot, s, columns), valid)
        x = tl.dot(goes.to(tl.float32), tl.load(added + own, valid, 0.0), x, input_precision=PRECISION)
        if rule == RADIUS or rule == COUNTS:  # noqa: SIM109
            radius += tl.sum(tl.where(goes, tl.load(added_radius + at + t, i < end, 0.0)[None, :], 0.0), 1)
    if rule == REFERENCE_COUNTS:  # each update adds 1 to every slot, of which there are C
        radius += tl.load(added_radius + at + s, s < chunk, 0.0)
    return x, radius


@triton.jit
def _take_back(
    x, radius, d_x, d_radius, s, at, rows, added_radius, sorted_slot, token, d_added, d_added_radius,
    token_stride, chunk: tl.constexpr, padded_chunk: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, rule: tl.constexpr,
):  # fmt: skip
    """Return the sums that `_add` kept in `d_added`, and write there the gradients of the tokens.

    Radii are subtracted, which is exact: a slot is given one, or whole numbers are added.
    """
    d = tl.arange(0, columns)[None, :]
    start, end = _own_tokens(sorted_slot, at, s, chunk, padded_chunk, block)
    blocks = tl.cdiv(end - start, TOKENS)
    for back in range(0, blocks):
        i = start + (blocks - 1 - back) * TOKENS + tl.arange(0, TOKENS)
        t, slot = tl.load(token + at + i, i < end, 0), tl.load(sorted_slot + at + i, i < end, -1)
        goes = slot[None, :] == s[:, None]
        own, valid = rows + t[:, None] * token_stride + d, (i < end)[:, None] & (d < size)
        # Those of one slot kept the same sums: take the last one's.
        last = tl.max(tl.where(goes, tl.arange(0, TOKENS)[None, :], -1), 1)
        place = tl.broadcast_to(tl.maximum(last, 0)[:, None], [block, columns])
        x = tl.where((last >= 0)[:, None], tl.gather(tl.load(d_added + own, valid, 0.0), place, 0), x)
        tl.debug_barrier()
        tl.store(d_added + own, _of_slots(d_x, slot, s, columns), valid)
        if rule == RADIUS or rule == COUNTS:  # noqa: SIM109
            radius -= tl.sum(tl.where(goes, tl.load(added_radius + at + t, i < end, 0.0)[None, :], 0.0), 1)
            tl.store(d_added_radius + at + t, tl.sum(tl.where(goes, d_radius[:, None], 0.0), 0), i < end)
    if rule == REFERENCE_COUNTS:
        radius -= tl.load(added_radius + at + s, s < chunk, 0.0)
        tl.store(d_added_radius + at + s, d_radius, s < chunk)
    return x, radius


@triton.jit
def _of_slots(x, slot, s, columns: tl.constexpr):
    """Select the rows of tokens' slots from those of slots `s`."""
    place = tl.maximum(slot - tl.min(s, 0), 0).to(tl.int32)
    return tl.gather(x, tl.broadcast_to(place[:, None], [TOKENS, columns]), 0)


@triton.jit
def _form(x, radius, weight, bias, size: tl.constexpr, columns: tl.constexpr, rule: tl.constexpr):
    """Bring sums `[S, D]` to the form they are read in (see `..slots.Reading`)."""
    d = tl.arange(0, columns)[None, :]
    if rule == KEYS:
        standard, _ = standardised(x, d < size, size)
        form = standard * tl.load(weight + d, d < size, 0.0) + tl.load(bias + d, d < size, 0.0)
    else:
        form = x * _scale(x, radius, rule)[0][:, None]
    return form


@triton.jit
def _scale(x, radius, rule: tl.constexpr):
    """Return the factors of value sums (radius over length, or one over the count), and their lengths."""
    length = tl.sqrt(tl.sum(x * x, 1))
    if rule == RADIUS:
        scale = radius / tl.maximum(length, SHORTEST)
    else:
        scale = 1 / tl.maximum(radius, 1.0)
    return scale, length


@triton.jit
def _norm_backward(x, d_read, weight, size: tl.constexpr, columns: tl.constexpr):
    """Return standardised sums, and the gradient of the sums from that of their LayerNorm."""
    d = tl.arange(0, columns)[None, :]
    standard, factor = standardised(x, d < size, size)
    d_standard = d_read * tl.load(weight + d, d < size, 0.0)
    mean, along = tl.sum(d_standard, 1) / size, tl.sum(d_standard * standard, 1) / size
    d_x = (d_standard - mean[:, None] - standard * along[:, None]) * factor
    return standard, tl.where(d < size, d_x, 0.0)


@triton.jit
def _scale_backward(x, radius, d_read, rule: tl.constexpr):
    """Return gradients of value sums and of radii from that of the values read; counts have none."""
    scale, length = _scale(x, radius, rule)
    d_x, d_radius = d_read * scale[:, None], tl.zeros(radius.shape, tl.float32)
    if rule == RADIUS:
        d_radius = tl.sum(x * d_read, 1) / tl.maximum(length, SHORTEST)
        # A longer sum is scaled down by as much.
        shrinking = tl.where(length >= SHORTEST, d_radius * scale / tl.maximum(length, SHORTEST), 0.0)
        d_x -= x * shrinking[:, None]
    return d_x, d_radius
