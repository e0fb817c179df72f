"""The Triton kernels, run by Triton's interpreter, against the functions that take one chunk at a time."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid.layers.kvm.contributions import Norm, Sums, contributions, prepare, weights
from hybrid.layers.kvm.routing import joined_choices, route
from hybrid.layers.kvm.slots import Reading, Slots
from hybrid.layers.kvm.slots import accumulate as add_to_slots
from hybrid.layers.kvm.spec import Budget, KVMSpec, Update, updates
from hybrid.layers.kvm.steps import steps

pytest.importorskip("triton")

from hybrid.layers.kvm.triton import read_group, read_group_backward, route_group

C = 8
GROWING = Budget("power_law", minimum=4, factor=3.0, round_to=2)
SPECS = {
    "growing": KVMSpec(C, 2, 4, 1, GROWING),
    "ungated": KVMSpec(C, 2, 4, 1, GROWING, gate_keys=False, gate_values=False),
    "gated appends": KVMSpec(C, 2, 4, 0, GROWING, gate_appends=True, gate_initial=True),
    "fixed": KVMSpec(C, 2, 4, 0, Budget("fixed", 20), gate_appends=True, gate_initial=True),
    "saturation": KVMSpec(C, 1, 2, 3, Budget("saturation", saturation=40), gate_values=False),
    "all sinks": KVMSpec(C, 2, 4, C, replace(GROWING, minimum=12)),
    "counts": KVMSpec(C, 3, 4, 2, replace(GROWING, max_chunks=2), gate_keys=False, values="counts"),
    "reference counts": KVMSpec(C, 2, 4, 1, Budget("fixed", C), values="reference_counts"),
    "one token": KVMSpec(1, 1, 4, 0, Budget("power_law", factor=1.5)),
    "many blocks": KVMSpec(70, 2, 4, 1, Budget("power_law", factor=12.0)),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


class Case:
    """Tokens of a group of updates, the sums before it, and the decisions of `route`."""

    def __init__(self, spec, made, heads=2, size=12, gated=True):
        torch.manual_seed(0)
        rows, held = sum(update.sequences for update in made), made[0].before
        tokens = made[0].after - held if made[0].number == 0 else spec.chunk
        self.spec, self.made, shape = spec, made, (rows, heads, tokens)
        self.norm = Norm(1 + torch.randn(size) / 3, torch.randn(size) / 3)
        self.keys = prepare(torch.randn(*shape, size), spec.rotary_dim, self.norm)
        self.values = torch.randn(*shape, size)
        self.gate = torch.rand(shape) * 1.5 * (torch.rand(shape) > 0.1) if gated else None
        before = torch.randn(2, made[0].sequences, heads, held, size) * 2
        counts = torch.randint(1, 5, (*before.shape[1:-1], 1)).float()
        self.before = Sums(*before, counts)
        self.readers = [made[0].sequences if held else 0, *(update.sequences for update in made)]

    @property
    def steps(self):
        _, heads, chunk, _ = self.keys.shape
        return steps(tuple(self.made), tuple(self.readers), heads, chunk, self.keys.device)

    def route(self):
        """Route by the reference, an update at a time."""
        slots = Slots(self.before, self.made[-1].after, self.norm, self.spec, torch.float32)
        sizes, choices = [update.sequences for update in self.made], []
        gates = [None] * len(sizes) if self.gate is None else self.gate.split(sizes)
        rows = zip(self.made, self.keys.split(sizes), self.values.split(sizes), gates, strict=True)
        for update, keys, values, gate in rows:
            choices.append(choice := route(keys, gate, slots, update))
            weight = weights(choice.founds, gate, [update], self.spec)
            add_to_slots(slots, contributions(keys, values, weight, self.spec), choice.slot, update)
        return joined_choices(choices)

    def added(self):
        choice = self.route()
        weight = weights(choice.founds, self.gate, self.made, self.spec)
        return contributions(self.keys, self.values, weight, self.spec), choice.slot

    def routes_agree(self):
        slot, founds = route_group(self.keys, self.gate, self.before.keys, self.steps, self.spec, self.norm)
        want = self.route()
        assert torch.equal(founds, want.founds)
        assert torch.equal(slot, want.slot)
        return slot, founds


def packed(spec, *last, **more):
    """A case of documents from their start, the last updates of which are given."""
    return Case(spec, updates(spec, list(last)), **more)


def carried(spec, first, last, **more):
    """A case of equal sequences that go on with update `first`."""
    return Case(spec, updates(spec, [last] * 2, first, spec.slots_after(first - 1)), **more)


def read_by_update(case, before, added, slot, norm, dtype):
    """What `read_group` returns, by operations of torch that autograd knows."""
    sums, row, read = list(before), 0, []
    for update, readers in zip((None, *case.made), case.readers, strict=True):
        if update is not None:
            rows = slice(row, row + update.sequences)
            row += update.sequences
            own = slot[rows, ..., None]
            radius_slot = own
            if case.spec.values == "reference_counts":
                radius_slot = torch.arange(own.shape[2])[:, None].expand_as(own)
            for i, place in enumerate((own, own, radius_slot)):
                old, new = sums[i][: update.sequences], added[i][rows]
                grown = old.new_zeros(*old.shape[:2], update.after - old.shape[2], old.shape[3])
                sums[i] = torch.cat((old, grown), 2).scatter_add(2, place.expand_as(new), new)
        if readers:
            own_sums = Sums(*(x[:readers] for x in sums))
            if case.spec.values != "radius":
                own_sums = own_sums._replace(radius=own_sums.radius.detach())
            form = Reading(own_sums, norm, case.spec).form(dtype)[:2]
            read.append([x.transpose(1, 2).flatten(0, 1) for x in form])
    if not read:
        nothing = before.keys.new_empty(0, *before.keys.shape[1::2])
        return nothing, nothing, Sums(*sums)
    keys, values = (torch.cat(x) for x in zip(*read, strict=True))
    return keys, values, Sums(*sums)


def states_agree(case, with_last=True):
    """Compare what is read, the last sums, and all gradients, with those in float64."""
    added, slot = case.added()
    group = case.before, added, slot, case.steps, case.spec, case.norm
    keys, values, last = read_group(*group, torch.float32)
    leaves = [x.double().requires_grad_() for x in (*case.before, *added, *case.norm)]
    wide = Sums(*leaves[:3]), Sums(*leaves[3:6]), slot, Norm(*leaves[6:]), torch.float64
    want_keys, want_values, want_last = read_by_update(case, *wide)
    got, want = (keys, values, *last), (want_keys, want_values, *want_last)
    close(got, want)
    grads = [torch.randn_like(x) for x in got]
    if not with_last:
        grads[2:] = [torch.zeros_like(x) for x in grads[2:]]
    total = sum((x * grad).sum() for x, grad in zip(want, grads, strict=True))
    wanted = torch.autograd.grad(total, leaves, allow_unused=True)
    d_before, d_added, d_norm = read_group_backward(
        *group, *grads[:2], grads[2:] if with_last else (None, None, None)
    )
    wanted = [torch.zeros_like(x) if d is None else d for x, d in zip(leaves, wanted, strict=True)]
    close((*d_before, *d_added, *d_norm), wanted)
    return d_added


def close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        scale = theirs.abs().max().item() if theirs.numel() else 1.0
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5 * max(1.0, scale), rtol=1e-5)


@EVERY_SPEC
def test_documents_of_several_lengths(spec):
    case = packed(spec, *((1,) if spec.chunk > C else (3, 1)), heads=1)
    _, founds = case.routes_agree()
    assert founds.any()
    states_agree(case)


@EVERY_SPEC
def test_going_on_from_a_state(spec):
    case = carried(spec, 2, 2 if spec.chunk > C else 3, heads=1)
    case.routes_agree()
    states_agree(case)


def test_a_state_still_shorter_than_a_chunk():
    """Few tokens enter in update 0, which goes on with earlier ones."""
    spec = SPECS["gated appends"]
    case = Case(spec, [Update(0, 2, 3, 5)])
    assert case.keys.shape[2] == 2
    case.routes_agree()
    states_agree(case)


def test_without_gates_readers_or_gradients_of_the_last_sums():
    made = updates(SPECS["growing"], [3, 1])
    case = Case(SPECS["growing"], made, gated=False)
    case.readers = [0, 2, 0, 1, 0]
    case.routes_agree()
    states_agree(case, with_last=False)
    case.readers = [0] * len(case.readers)
    states_agree(case)


def test_added_tokens_may_lie_by_time():
    """As tokens `[R, C, G, D]` do; their gradients lie likewise."""
    case = packed(SPECS["growing"], 2, 1)
    made = case.added()
    case.added = lambda: (Sums(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in made[0])), made[1])
    d_added = states_agree(case)
    assert d_added.keys.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reading_in_a_narrow_dtype(dtype):
    case = carried(SPECS["growing"], 2, 2)
    group = case.before, *case.added(), case.steps, case.spec, case.norm
    narrow, wide = read_group(*group, dtype), read_group(*group, torch.float32)
    for got, want in zip(narrow[:2], wide[:2], strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), want, atol=1e-2, rtol=1e-2)
    grads = [torch.randn_like(x) for x in narrow[:2]]
    got = read_group_backward(*group, *grads)
    want = read_group_backward(*group, *(x.float() for x in grads))
    for mine, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_equal_scores_go_to_the_first_slot_and_earlier_tokens_are_appended():
    spec = replace(SPECS["growing"], sinks=2)
    case = carried(spec, 2, 3)
    case.keys[:] = case.keys[0, 0, 0]
    case.before.keys[:] = case.keys[0, 0, 0]
    slot, founds = case.routes_agree()
    appended = case.made[0].after - case.made[0].before
    assert 0 < appended < C
    assert founds[0, 0].tolist() == [i < appended for i in range(C)]
    assert slot[0, 0].tolist() == [*range(case.made[0].before, case.made[0].after), *[2] * (C - appended)]


def test_gates_of_zero_go_to_the_first_slot_that_takes_merges():
    case = carried(SPECS["saturation"], 2, 3)
    case.gate[:] = 0
    slot, founds = case.routes_agree()
    assert (slot[~founds] == 3).all()
    assert not founds.all()


def test_values_of_length_zero_have_no_direction():
    case = packed(SPECS["growing"], 2, 2)
    case.values[:, :, ::3] = 0
    states_agree(case)


def test_results_are_the_same_in_every_run_and_nan_stays_inside_memory():
    case = carried(SPECS["growing"], 2, 4)
    group = case.before, *case.added(), case.steps, case.spec, case.norm
    first, second = (read_group(*group, torch.float32)[0] for _ in range(2))
    assert torch.equal(first, second)
    case.keys[0] = torch.nan
    slot, founds = route_group(case.keys, case.gate, case.before.keys, case.steps, case.spec, case.norm)
    row = 0
    for update in case.made:
        rows = slice(row, row + update.sequences)
        assert (founds[rows].sum(-1) == update.after - update.before).all()
        assert ((slot[rows] >= 0) & (slot[rows] < update.after)).all()
        row += update.sequences


def test_kernels_compile_for_an_h100():
    """In a process without the interpreter; what programs need of shared memory is there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.kvm.compile_for_h100"],
        cwd=Path(__file__).parents[3], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("bytes:")]
    assert len(found) == 5
    assert max(found) <= 227 << 10
