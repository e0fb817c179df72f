"""Slots that change in place, and their gradients on the way back, against plain autograd."""

from __future__ import annotations

import pytest
import torch

from hybrid.layers.kvm import slots as module
from hybrid.layers.kvm.budget import Budget
from hybrid.layers.kvm.contributions import Norm, Sums
from hybrid.layers.kvm.slots import SlotGradients, Slots, absorbed, places, read
from hybrid.layers.kvm.spec import KVMSpec, Update

N, G, C, D = 2, 2, 4, 6
STEPS = [Update(3, 2, 5, 6), Update(4, 2, 6, 6), Update(5, 1, 6, 8)]
SPEC = KVMSpec(C, 2, 4, 1, Budget("power_law", 1))


def tensors(*shape):
    return Sums(*(torch.rand(*shape, size, dtype=torch.float64).requires_grad_() for size in (D, D, 1)))


@pytest.fixture(params=["all slots", "picked slots"])
def case(request, monkeypatch):
    """Slots before, what three updates add and where, the norm; the second sequence ends early."""
    monkeypatch.setattr(module, "DENSE", 2 if request.param == "all slots" else 0)
    torch.manual_seed(0)
    norm = Norm(*(torch.rand(D, dtype=torch.float64).requires_grad_() for _ in range(2)))
    added = [tensors(step.sequences, G, C) for step in STEPS]
    added[1] = added[1]._replace(radius=torch.zeros_like(added[1].radius))  # it appends nothing
    ways = [torch.randint(0, step.after, (step.sequences, G, C)) for step in STEPS]
    for step, way in zip(STEPS, ways, strict=True):  # a new slot gets a token
        way[:, :, : step.after - step.before] = torch.arange(step.before, step.after)
    ways[1][:, :, 0] = ways[1][:, :, 1]  # two tokens of one slot
    return tensors(N, G, 5), added, ways, norm


def started(before, norm):
    own = Norm(*(x.detach() for x in norm))
    slots = Slots((N, G, 8, D), own, SPEC, torch.float64)
    slots.start(Sums(*(x.detach() for x in before)), 8)
    return slots


def test_updates_equal_new_slots_and_what_is_read_can_be_taken_back(case):
    before, added, ways, norm = case
    slots, want = started(before, norm), before
    at = [places(way, step, 8, SPEC) for step, way in zip(STEPS, ways, strict=True)]
    changes, forms = [], []
    for step, new, way, place in zip(STEPS, added, ways, at, strict=True):
        want = absorbed(Sums(*(x[: step.sequences] for x in want)), new, way, step, SPEC)
        forms.append([x.clone() for x in slots.readable(step.sequences, step.before)])
        changes.append(slots.advance(Sums(*(x.detach() for x in new)), place))
        for x, y in zip(slots.sums, want, strict=True):
            assert torch.equal(x[: step.sequences, :, : step.after], y)
        for x, y in zip(
            slots.readable(step.sequences, step.after), read(want, norm, SPEC, torch.float64), strict=True
        ):
            torch.testing.assert_close(x.transpose(1, 2), y)
    once = started(before, norm)
    for new, place in zip(added, at, strict=True):
        once.update(Sums(*(x.detach() for x in new)), place)
    for x, y in zip(once.readable(1, 8), slots.readable(1, 8), strict=True):
        assert torch.equal(x, y)
    for step, place, change, form in zip(*map(reversed, (STEPS, at, changes, forms)), strict=True):
        slots.restore(change, place)
        for x, y in zip(slots.readable(step.sequences, step.before), form, strict=True):
            assert torch.equal(x, y)


def test_gradients_equal_those_through_every_state(case):
    """Every state is read, by weights of its own, and the last sums are used as well."""
    before, added, ways, norm = case
    state, total, weights = before, 0.0, []
    for step, new, way in zip(STEPS, added, ways, strict=True):
        state = absorbed(Sums(*(x[: step.sequences] for x in state)), new, way, step, SPEC)
        seen = read(state, norm, SPEC, torch.float64)
        weights.append([torch.rand_like(x) for x in seen])
        total = total + sum((x * w).sum() for x, w in zip(seen, weights[-1], strict=True))
    last = Sums(*(torch.rand_like(x) for x in state))
    total = total + sum((x * w).sum() for x, w in zip(state, last, strict=True))
    leaves = [*before, *norm, *(x for new in added for x in new if x.requires_grad)]
    want = torch.autograd.grad(total, leaves)

    slots = started(before, norm)
    d_norm = Norm(*(torch.zeros(D, dtype=torch.float64) for _ in range(2)))
    at = [places(way, step, 8, SPEC) for step, way in zip(STEPS, ways, strict=True)]
    new = [Sums(*(x.detach() for x in new)) for new in added]
    changes = [slots.advance(*pair) for pair in zip(new, at, strict=True)]
    gradients, found = SlotGradients(slots, last, d_norm), []
    for place, own, change, new in zip(*map(reversed, (at, weights, changes, added)), strict=True):
        gradients.add(*(w.transpose(1, 2) for w in own))
        out = Sums(*(torch.empty(x[..., 0].numel(), x.shape[-1], dtype=x.dtype) for x in new))
        gradients.take_back(change, place, out)
        slots.restore(change, place)
        found.append(out)
    tokens = [
        x.unflatten(0, (step.sequences, C, G)).transpose(1, 2)
        for step, sums in zip(STEPS, reversed(found), strict=True)
        for x, new in zip(sums, added[STEPS.index(step)], strict=True)
        if new.requires_grad
    ]
    for x, y in zip([*gradients.first(before), *d_norm, *tokens], want, strict=True):
        torch.testing.assert_close(x, y)
