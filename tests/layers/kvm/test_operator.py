"""The operator against its reference twin, for every length, split and packing."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.layers import LayerError
from hybrid.layers.kvm.attention import Budget, KVMSpec, Routes, kvm_attention

from ...parity.kvm_reference import reference

H, G, D, C = 4, 2, 8, 8
GROWING = Budget("power_law", minimum=4, factor=3.0, round_to=2)
SPECS = {
    "growing": KVMSpec(C, 2, 4, 1, GROWING),
    "fixed": KVMSpec(C, 2, 4, 0, Budget("fixed", 20), gate_appends=True, gate_initial=True),
    "saturation": KVMSpec(C, 1, 2, 3, Budget("saturation", saturation=40), gate_values=False),
    "three chunks": KVMSpec(C, 3, 4, 2, replace(GROWING, max_chunks=2), gate_keys=False, values="counts"),
    "one token": KVMSpec(1, 1, 4, 0, Budget("power_law", factor=1.5)),
    "few": KVMSpec(3, 4, 4, 1, Budget("fixed", 1), gate_keys=False, gate_values=False),
}
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 65, 100)
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def inputs(tokens, batch=1, dtype=torch.float64, seed=0):
    """Leaves q, k, v, gate, norm weight and bias, front and state temperature, state bias."""
    torch.manual_seed(seed)
    rows = (batch, tokens)
    q, k, v = torch.randn(*rows, H, D), torch.randn(*rows, G, D), torch.randn(*rows, G, D)
    more = torch.rand(*rows, G) * 1.5 + 0.05, 1 + torch.randn(D) / 3, torch.randn(D) / 3
    of_heads = 1 + torch.randn(H) / 3, 1 + torch.randn(H) / 3, torch.randn(H)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, *more, *of_heads)]


def run(leaves, spec, **more):
    q, k, v, gate, weight, bias, front, back, state_bias = leaves
    options = {
        "norm_weight": weight,
        "norm_bias": bias,
        "front_temperature": front,
        "state_temperature": back,
        "state_bias": state_bias,
    }
    return kvm_attention(q, k, v, gate, spec=spec, **options, **more)


def tokens_of(leaves, span):
    return [*(x[:, span] for x in leaves[:4]), *leaves[4:]]


def gradients(leaves, *results):
    """Of a fixed random combination of the results."""
    torch.manual_seed(1)
    total = sum((x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in results)
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def close(got, want, tolerance):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


def state_of(state):
    return [*state.sums(), *(x for name, x in state.tensors().items() if name.startswith("window"))]


@EVERY_SPEC
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [*((n, torch.float32) for n in LENGTHS), (17, torch.float64), (100, torch.float64)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_every_length_equals_the_recurrence(spec, tokens, dtype):
    """Values, final state and all gradients, also of partial chunks (fla-org/flash-linear-attention#88)."""
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    leaves = inputs(tokens, dtype=dtype)
    y, state, routes = run(leaves, spec)
    q, k, v, gate, *others = leaves
    want = reference(q, k, v, gate, spec, *others)
    covered = spec.coverage(tokens)
    assert routes.first == 0
    assert torch.equal(routes.slot.long(), want.slot[..., :covered])
    assert torch.equal(routes.founds, want.founds[..., :covered])
    assert (want.slot[..., covered:] == -1).all()
    assert (state.position, state.slots) == (tokens, want.key_sums.shape[2])
    mine = y, state.key_sums, state.value_sums, state.radius[..., 0]
    theirs = want.y, want.key_sums, want.value_sums, want.radius
    close(mine, theirs, tolerance)
    close(gradients(leaves, *mine), gradients(leaves, *theirs), tolerance)


def test_reference_counts_count_every_update_for_every_slot():
    spec = KVMSpec(C, 2, 4, 1, Budget("fixed", C), values="reference_counts")
    leaves = inputs(61)
    y, state, _ = run(leaves, spec)
    want = reference(*leaves[:4], spec, *leaves[4:])
    assert torch.equal(state.radius, torch.full((1, G, C, 1), 1.0 + 5, dtype=torch.float64))
    close([y], [want.y], 1e-9)
    with torch.no_grad():
        steps = [run(tokens_of(leaves, slice(0, 40)), spec)]
        steps.append(run(tokens_of(leaves, slice(40, 61)), spec, state=steps[0][1]))
    close([torch.cat([s[0] for s in steps], 1)], [want.y], 1e-9)
    with pytest.raises(LayerError, match="reference_counts"):
        replace(spec, budget=GROWING)


@EVERY_SPEC
def test_a_batch_is_its_sequences(spec):
    leaves = inputs(70, batch=3)
    y, state, routes = run(leaves, spec)
    for b in range(3):
        alone = [*(x[b : b + 1] for x in leaves[:4]), *leaves[4:]]
        own_y, own_state, own_routes = run(alone, spec)
        close([y[b : b + 1]], [own_y], 1e-12)
        close([x[b : b + 1] for x in state_of(state)], state_of(own_state), 1e-12)
        assert torch.equal(routes.slot[b], own_routes.slot[0])


def pieces(total):
    return st.lists(st.integers(1, total), max_size=6).map(
        lambda cuts: sorted({c for c in cuts if c < total} | {0, total})
    )


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SPECS)), st.integers(1, 90).flatmap(pieces), st.booleans())
def test_any_split_is_one_call(name, cuts, grad):
    """Values, state and, with gradients, all of those too; without, the state is written in place.

    The paper's code refuses several new tokens with a cache (recursal/KVM-paper, model/kvm_mixer.py).
    """
    spec, total = SPECS[name], cuts[-1]
    leaves = inputs(total, batch=2)
    with torch.set_grad_enabled(grad):
        y, whole, routes = run(leaves, spec)
        state, parts, slots = None, [], []
        for start, end in pairwise(cuts):
            part, state, made = run(tokens_of(leaves, slice(start, end)), spec, state=state)
            assert (state.position, made.first) == (end, spec.coverage(start))
            parts.append(part)
            slots.append(made.slot)
    together = torch.cat(parts, 1)
    close([together], [y], 1e-10)
    close(state_of(state), state_of(whole), 1e-10)
    assert torch.equal(torch.cat(slots, 2), routes.slot)
    assert state.nbytes == whole.nbytes
    if grad:
        mine, theirs = [together, *state_of(state)], [y, *state_of(whole)]
        close(gradients(leaves, *mine), gradients(leaves, *theirs), 1e-9)


@EVERY_SPEC
@pytest.mark.parametrize("prompt", [1, 5, 8, 31])
def test_token_by_token_is_one_call(spec, prompt):
    leaves = inputs(60)
    with torch.no_grad():
        y, whole, _ = run(leaves, spec)
        first, state, _ = run(tokens_of(leaves, slice(0, prompt)), spec)
        parts = [first]
        for t in range(prompt, 60):
            part, state, _ = run(tokens_of(leaves, slice(t, t + 1)), spec, state=state)
            parts.append(part)
    close([torch.cat(parts, 1)], [y], 1e-12)
    close(state_of(state), state_of(whole), 1e-12)


def test_decoding_writes_into_the_same_buffers():
    spec, leaves = SPECS["growing"], inputs(64)
    with torch.no_grad():
        _, state, _ = run(tokens_of(leaves, slice(0, 40)), spec)
        _, state, _ = run(tokens_of(leaves, slice(40, 41)), spec, state=state)
        before = state.window_k.data_ptr(), state.key_sums.data_ptr()
        for t in range(41, 48):
            _, state, _ = run(tokens_of(leaves, slice(t, t + 1)), spec, state=state)
    assert (state.window_k.data_ptr(), state.key_sums.data_ptr()) == before


def test_a_state_is_spent_without_gradients_and_a_value_with_them():
    spec, leaves = SPECS["growing"], inputs(50)
    with torch.no_grad():
        _, state, _ = run(tokens_of(leaves, slice(0, 41)), spec)
        copy = state.fork()
        one, _, _ = run(tokens_of(leaves, slice(41, 50)), spec, state=state)
        two, _, _ = run(tokens_of(leaves, slice(41, 50)), spec, state=copy)
        with pytest.raises(LayerError, match="handed on"):
            run(tokens_of(leaves, slice(41, 50)), spec, state=state)
    assert torch.equal(one, two)
    _, state, _ = run(tokens_of(leaves, slice(0, 41)), spec)
    kept = [x.clone() for x in state_of(state)]
    again = [run(tokens_of(leaves, slice(41, 50)), spec, state=state)[0] for _ in range(2)]
    assert torch.equal(*again)
    close([again[0]], [one], 1e-12)
    with torch.no_grad():
        run(tokens_of(leaves, slice(41, 50)), spec, state=state.detach())
    assert all(torch.equal(a, b) for a, b in zip(kept, state_of(state), strict=True))


@settings(derandomize=True, max_examples=15, deadline=None)
@given(st.sampled_from(sorted(SPECS)), st.lists(st.integers(1, 70), min_size=1, max_size=5))
def test_packed_documents_equal_each_alone(name, lengths):
    """Values, routes, gradients; free and replayed."""
    spec = SPECS[name]
    leaves = inputs(sum(lengths))
    y, state, routes = run(leaves, spec, lengths=tuple(lengths), want_margins=True)
    assert state is None
    borders = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    alone = [run(tokens_of(leaves, slice(a, b)), spec) for a, b in pairwise(borders)]
    want = torch.cat([a[0] for a in alone], 1)
    close([y], [want], 1e-11)
    assert torch.equal(routes.slot, torch.cat([a[2].slot for a in alone], 2))
    assert torch.equal(routes.founds, torch.cat([a[2].founds for a in alone], 2))
    assert routes.margin.shape == routes.slot.shape
    close(gradients(leaves, y), gradients(leaves, want), 1e-10)
    again = run(leaves, spec, lengths=tuple(lengths), routes=routes)
    assert torch.equal(again[0], y)
    assert torch.equal(again[2].slot, routes.slot)


@EVERY_SPEC
def test_routes_can_be_replayed(spec):
    """Another sequence's routes are followed, in one call and in several, with their gradients."""
    leaves, others = inputs(75), inputs(75, seed=5)
    foreign = run(others, spec)[2]
    given_slots = [torch.full((1, G, 75), -1), torch.zeros(1, G, 75, dtype=torch.bool)]
    for full, part in zip(given_slots, (foreign.slot, foreign.founds), strict=True):
        full[..., : part.shape[2]] = part
    y, state, made = run(leaves, spec, routes=foreign)
    want = reference(*leaves[:4], spec, *leaves[4:], replay=given_slots)
    assert torch.equal(made.slot, foreign.slot)
    close([y, state.key_sums], [want.y, want.key_sums], 1e-9)
    close(gradients(leaves, y), gradients(leaves, want.y), 1e-9)
    state, parts = None, []
    for start, end in ((0, 3), (3, 44), (44, 45), (45, 75)):
        part, state, _ = run(tokens_of(leaves, slice(start, end)), spec, state=state, routes=foreign)
        parts.append(part)
    close([torch.cat(parts, 1)], [y], 1e-10)


def test_routes_that_do_not_reach_are_refused():
    leaves = inputs(75)
    spec = SPECS["growing"]
    routes = run(tokens_of(leaves, slice(0, 40)), spec)[2]
    with pytest.raises(LayerError, match=r"for 24 tokens from 0 on.*8 from 24 on"):
        run(leaves, spec, routes=routes)


def test_ties_go_to_the_earlier_token_and_the_lower_slot():
    """Equal keys, so all scores tie: the first tokens are appended, the others join the first free slot."""
    spec = KVMSpec(4, 1, 4, 2, Budget("fixed", 6))
    leaves = [x.detach() for x in inputs(12)]
    leaves[1][:] = leaves[1][:, :1]
    leaves[3][:] = 1.0
    _, state, routes = run(leaves, spec)
    assert routes.slot[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 2, 2]
    assert routes.founds[0, 0].tolist() == [True] * 6 + [False] * 2
    want = reference(*leaves[:4], spec, *leaves[4:])
    assert torch.equal(want.slot[0, 0, :8].int(), routes.slot[0, 0])
    assert state.slots == 6


def test_a_gate_of_zero_goes_to_the_first_unprotected_slot():
    spec = KVMSpec(4, 1, 4, 1, Budget("fixed", 4))
    leaves = [x.detach() for x in inputs(8, seed=3)]
    leaves[3][:, 4:] = 0.0
    _, _, routes = run([*(torch.cat((x, x[:, :1]), 1) for x in leaves[:4]), *leaves[4:]], spec)
    assert (routes.slot[..., 4:] == 1).all()


def test_free_routes_change_only_where_the_margin_is_small():
    """Keys disturbed by rounding: each head's first changed decision was a near tie."""
    spec = SPECS["growing"]
    leaves = [x.detach() for x in inputs(400, dtype=torch.float32)]
    leaves[1] = (leaves[1] * 4).round() / 4  # many near and exact ties
    disturbed = [*leaves]
    disturbed[1] = leaves[1] + 1e-6 * torch.randn_like(leaves[1])
    a, b = (run(x, spec, want_margins=True)[2] for x in (leaves, disturbed))
    assert a.margin.min() < 1e-4
    for g in range(G):
        changed = ((a.slot != b.slot) | (a.founds != b.founds))[0, g].nonzero()
        if len(changed):
            update = slice(int(changed[0]) // C * C, int(changed[0]) // C * C + C)
            assert a.margin[0, g, update].min() < 1e-4
    ordinary = run(inputs(400), spec, want_margins=True)[2]
    assert ordinary.margin[..., C:].isfinite().any()
    assert (ordinary.margin >= 0).all()


@EVERY_SPEC
@pytest.mark.parametrize(
    ("name", "value"),
    [("chunks.GROUP_CHUNKS", 2), ("chunks.GROUP_CHUNKS", 100), ("slots.DENSE", 0), ("slots.DENSE", 100)],
    ids=["few chunks a group", "one group", "picked slots are read", "all slots are read"],
)
def test_how_the_walk_goes_makes_no_difference(spec, name, value, monkeypatch):
    """Same values, gradients, state, also packed and in a batch."""
    for more in ({}, {"lengths": (60, 9, 41)}):
        leaves = inputs(110, batch=1 if more else 2)
        y, state, _ = run(leaves, spec, **more)
        want = gradients(leaves, y)
        monkeypatch.setattr(f"hybrid.layers.kvm.{name}", value)
        again, other, _ = run(leaves, spec, **more)
        close([again], [y], 1e-12)
        close(gradients(leaves, again), want, 1e-11)
        if state is not None:
            close(state_of(other), state_of(state), 1e-12)
        with torch.no_grad():
            close([run(leaves, spec, **more)[0]], [y], 1e-12)
        monkeypatch.undo()


def test_the_slots_of_all_chunks_are_not_kept_for_the_backward():
    """A quarter of them would be more than everything that is kept."""
    spec = KVMSpec(C, 2, 4, 1, Budget("fixed", 512))
    leaves = inputs(1500, dtype=torch.float32)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        _, state, _ = run(leaves, spec)
    slots = sum(min(C * n, 512) for n in range(1, 1500 // C)) * G * (2 * D + 1) * 4
    assert state.slots == 512
    assert sum(kept.values()) < slots / 4


def test_a_sequence_of_131073_tokens_is_right_at_its_end():
    """The last 64 outputs, against the same tokens read in pieces, the end one by one."""
    spec, tokens = KVMSpec(256, 2, 4, 1, Budget("power_law", 256)), 131073
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 1, 8, generator=generator) for _ in range(3))
    gate = torch.rand(1, tokens, 1, generator=generator)
    more = {"spec": spec, "norm_weight": torch.ones(8), "norm_bias": torch.zeros(8)}
    state, outputs = None, []
    with torch.no_grad():
        whole, after, routes = kvm_attention(q, k, v, gate, **more)
        cuts = [32768, 32768, 32768, 32000, 700, *[1] * 69]
        for piece in zip(*(x.split(cuts, 1) for x in (q, k, v, gate)), strict=True):
            y, state, _ = kvm_attention(*piece, **more, state=state, routes=routes)
            outputs.append(y)
    assert after.slots == state.slots == spec.slots_after(510)
    torch.testing.assert_close(whole[:, -64:], torch.cat(outputs, 1)[:, -64:], atol=1e-4, rtol=0)


def test_statistics():
    spec, leaves, found = SPECS["growing"], inputs(100), {}
    _, state, _ = run(leaves, spec, statistics=found)
    assert found["slots"] == state.slots
    assert math.isclose(found["tokens_per_slot"], spec.coverage(100) / state.slots, rel_tol=1e-6)
    # With values 1 in the state and 0 in the window, the last chunk's outputs are its mass on slots.
    leaves = [x.detach() for x in leaves]
    leaves[2][:, :88], leaves[2][:, 88:] = 1.0, 0.0
    spec, one = replace(spec, values="counts", gate_values=False), {}
    with torch.no_grad():
        _, state, _ = run(tokens_of(leaves, slice(0, 96)), spec)
        y, _, _ = run(tokens_of(leaves, slice(96, 100)), spec, state=state, statistics=one)
    torch.testing.assert_close(one["state_mass"], y.mean(), atol=1e-12, rtol=0)
    whole = {}
    run(leaves, spec, lengths=(100,), statistics=whole)
    assert 0.1 < whole["state_mass"] < one["state_mass"]
    assert whole["slots"] == one["slots"]
    short = {}
    run(tokens_of(leaves, slice(0, 15)), spec, lengths=(5, 10), statistics=short)
    assert (short["slots"], short["tokens_per_slot"], short["state_mass"]) == (6.5, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_output_dtype_is_the_input_dtype(dtype):
    """fp32 within 1e-5 of float64, the same routes replayed.

    The paper's code casts its values to bf16, whatever the model's dtype (recursal/KVM-paper).
    """
    spec = SPECS["growing"]
    exact = inputs(100)
    small = [x.detach().to(dtype).requires_grad_() for x in exact]
    y, state, routes = run(small, spec)
    want = run([x.double() for x in small], spec, routes=routes)[0]
    assert y.dtype == dtype
    assert state.key_sums.dtype == torch.float32
    assert state.window_k.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    close([y.double()], [want], tolerance)
    y.float().sum().backward()
    assert all(x.grad.dtype == dtype for x in small)
    with torch.no_grad():
        _, carried, _ = run(tokens_of(small, slice(0, 70)), spec)
        tail = run(tokens_of(small, slice(70, 100)), spec, state=carried, routes=routes)[0]
    close([tail.double()], [want[:, 70:]], tolerance)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_everything_is_finite(tokens, dtype):
    """Some layers give NaN in bf16 as built (fla-org/flash-linear-attention#150)."""
    for seed in range(3):
        leaves = inputs(tokens, dtype=dtype, seed=seed)
        y, _, _ = run(leaves, KVMSpec(16, 2, 4, 1, Budget("power_law", factor=4.0)))
        y.float().square().sum().backward()
        assert torch.isfinite(y).all()
        assert all(x.grad is None or torch.isfinite(x.grad).all() for x in leaves)


def test_zero_values_and_equal_keys_are_finite():
    leaves = inputs(60, dtype=torch.float32)
    with torch.no_grad():
        leaves[1][:] = 1.0
        leaves[2][:] = 0.0
    y, _, _ = run(leaves, SPECS["growing"])
    y.sum().backward()
    assert (y == 0).all()
    assert all(torch.isfinite(x.grad).all() for x in leaves)


@pytest.fixture
def poisoned():
    """Every uninitialised tensor is full of NaN, and operations that vary between runs are refused."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@EVERY_SPEC
def test_same_numbers_twice_and_nothing_read_uninitialised(spec, poisoned):
    """Backwards elsewhere vary between runs (Dao-AILab/flash-attention#414, #988, #2244)."""
    found = []
    for _ in range(2):
        leaves = inputs(83, batch=2, dtype=torch.float32)
        y, state, _ = run(leaves, spec)
        y.square().sum().backward()
        with torch.no_grad():
            tail = run(tokens_of(leaves, slice(0, 9)), spec, state=state)[0]
        grads = [x.grad for x in leaves if x.grad is not None]
        found.append([y, tail, *state_of(state), *grads])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.isfinite(x).all() for x in found[0])


def test_autocast_does_not_reach_sums_and_routing():
    leaves = [x.detach() for x in inputs(100, dtype=torch.float32)]
    low = [x.bfloat16() if i < 3 else x for i, x in enumerate(leaves)]
    want, _, routes = run(low, SPECS["growing"])
    with torch.autocast("cpu", torch.bfloat16):
        y, state, made = run(leaves, SPECS["growing"])
    assert y.dtype == torch.bfloat16
    assert state.key_sums.dtype == torch.float32
    assert torch.equal(made.slot, routes.slot)
    assert torch.equal(y, want)


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, lambda x: x[0], r"must be \[batch, tokens, heads, size\]"),
        (1, lambda x: x[:, :2], "do not fit together"),
        (2, lambda x: x[..., :4], "do not fit together"),
        (3, lambda x: x[..., None], "merge_gate is"),
        (4, lambda x: x[:6], r"norm_weight is \(6,\), .* it must be \(8,\)"),
        (7, lambda x: x[:2], r"state_temperature is \(2,\), .* it must be \(4,\)"),
    ],
)
def test_operands_that_do_not_fit_are_named(place, change, words):
    leaves = inputs(5)
    leaves[place] = change(leaves[place])
    with pytest.raises(LayerError, match=words):
        run(leaves, SPECS["growing"])


def test_impossible_settings_are_named():
    leaves = inputs(5)
    for wrong, words in (
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"sinks": 9}, "sinks is 9"),
        ({"window_chunks": 0}, "window_chunks is 0"),
        ({"values": "mean"}, "values is 'mean'"),
        ({"sinks": 8, "budget": Budget("fixed", 8)}, "lower sinks"),
    ):
        with pytest.raises(LayerError, match=words):
            replace(SPECS["growing"], **wrong)
    with pytest.raises(LayerError, match="below the head size 8"):
        run(leaves, replace(SPECS["growing"], rotary_dim=8))
    with pytest.raises(LayerError, match="budget is 'cubic'"):
        Budget("cubic")
    with pytest.raises(LayerError, match="saturation"):
        Budget("saturation")
    with pytest.raises(LayerError, match="lengths"):
        run(leaves, SPECS["growing"], lengths=(5, 0))
    _, state, _ = run(leaves, SPECS["growing"])
    with pytest.raises(LayerError, match="all calls of a sequence or in none"):
        run([*leaves[:3], None, *leaves[4:]], SPECS["growing"], state=state)


def test_routes_say_what_they_are_for():
    routes = run(inputs(20), SPECS["growing"])[2]
    assert isinstance(routes, Routes)
    assert routes.slot.dtype == torch.int32
    assert routes.slot.shape == (1, G, 8)
