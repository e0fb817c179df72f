"""The KVM layer around its operator: options, projections, gate, routes through the context, accounts."""

import functools

import pytest
import torch

from hybrid.layers import Context, LayerError, Site, mixer_class
from hybrid.layers.kvm import mixer as module
from hybrid.layers.kvm.mixer import KVM, KVMOptions

from ...parity.twins import kvm_layer
from ..mixers import (
    HIDDEN,
    assert_same_gradients,
    assert_same_state,
    build,
    gradients,
    in_pieces,
    packed_context,
    tokens,
)

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 65, 100)
NO_GATES = {"gate_keys": False, "gate_values": False}


@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_gradients_match_the_stepwise_twin(length):
    """Also of partial chunks (fla-org/flash-linear-attention#88, #1140)."""
    mixer, x = build("kvm", torch.float32), tokens(2, length, torch.float32).requires_grad_()
    y, (expected, _) = mixer(x)[0], kvm_layer(mixer, x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected), 2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        NO_GATES | {"temperatures": False},
        NO_GATES | {"gate_initial": True},
        {"state_bias": False},
        {"state_bias": True, "temperatures": False, "window_chunks": 1, "num_kv_heads": 1},
        {"budget": "fixed", "budget_minimum": 1, "sinks": 0},
        {"budget": "fixed", "budget_minimum": 8, "values": "reference_counts"},
        {"budget": "saturation", "budget_saturation": 40, "budget_round": 4, "budget_minimum": 1},
        {"values": "counts", "gate_appends": False, "window_chunks": 3},
        {"chunk": 5, "window_chunks": 1, "budget_factor": 50.0, "budget_max_chunks": 2, "num_kv_heads": 1},
        {"chunk": 1, "sinks": 0, "budget_minimum": 1, "rotary_dim": 2, "head_dim": 6},
    ],
)
def test_every_option_matches_the_stepwise_twin(changes):
    mixer, x = build("kvm", **changes), tokens(1, 60)
    expected, twin = kvm_layer(mixer, x)
    y, state = mixer(x)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)
    assert state.operator.slots == twin.key_sums.shape[2]
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(mixer, x, [1] * 60)[0], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(in_pieces(mixer, x, [13, 1, 30, 16])[0], expected, atol=1e-6, rtol=0)


def test_parameters_that_have_no_use_do_not_exist():
    every = set(dict(build("kvm").named_parameters()))
    assert {
        "merge_gate.weight",
        "front_head_temp",
        "state_head_temp",
        "state_head_bias",
        "ln_s_k.weight",
        "ln_s_k.bias",
    } <= every
    bare = set(dict(build("kvm", **NO_GATES, temperatures=False, state_bias=False).named_parameters()))
    assert every - bare == {"merge_gate.weight", "front_head_temp", "state_head_temp", "state_head_bias"}
    one = dict(build("kvm", gate_keys=False).named_parameters())
    assert one["merge_gate.weight"].shape == (2, HIDDEN)


def test_the_gate_is_positive_and_has_its_formula():
    mixer = build("kvm", torch.float32, state_bias=False)
    x = tokens(1, 50, torch.float32) * 30
    z = mixer.merge_gate(x)
    gate = module.positive_gate(mixer.merge_gate(x))
    torch.testing.assert_close(gate, torch.where(z < 0, z.exp(), 1 + z))
    assert (gate > 0).all()
    assert float(z.detach().min()) < -20  # where 1 + elu(z) has underflowed
    assert module.positive_gate(z.bfloat16()).dtype == torch.float32


def test_start_values():
    mixer = KVM(KVMOptions(num_heads=4, num_kv_heads=2, state_bias=True), Site(64))
    assert torch.equal(mixer.state_head_bias, torch.zeros(4))
    assert torch.equal(mixer.front_head_temp, torch.ones(4))
    assert torch.equal(mixer.state_head_temp, torch.ones(4))
    assert torch.equal(mixer.ln_s_k.weight, torch.ones(16))
    assert 0 < float(mixer.merge_gate.weight.detach().abs().max()) <= 1 / 8
    assert not mixer.c_proj.weight.any()
    assert {
        "front_head_temp",
        "state_head_temp",
        "state_head_bias",
        "x_q",
        "v_gate0",
        "ln_s_k.bias",
    } <= mixer.no_decay()
    assert not {"merge_gate.weight", "v_gate1.weight", "v_gate2.weight"} & mixer.no_decay()


# Routes


def test_recorded_routes_are_replayed():
    mixer, x = build("kvm", torch.float32), tokens(2, 90, torch.float32).requires_grad_()
    routes = {}
    y, state = mixer(x, Context.of(x, routes=routes))
    assert routes.keys() == {0}
    recorded = routes[0].slot.clone()
    other = tokens(2, 90, torch.float32, seed=9)
    replayed, _ = mixer(other, Context.of(other, routes=routes))
    assert torch.equal(routes[0].slot, recorded)
    assert float((replayed - mixer(other)[0]).detach().abs().max()) > 1e-3  # its own would be others
    expected = gradients(mixer, x, y)
    for cuts in ([1] * 90, [3, 60, 1, 26], [16, 8, 66]):
        split, after = in_pieces(mixer, x, cuts, routes=routes)
        torch.testing.assert_close(split, y, atol=1e-5, rtol=0)
        assert_same_state(after, state, 2e-5)
        assert_same_gradients(gradients(mixer, x, split), expected, 2e-5)


@pytest.mark.parametrize("want_state", [True, False])
def test_packed_routes_are_replayed(want_state):
    mixer, x = build("kvm", torch.float32), tokens(1, 90, torch.float32).requires_grad_()
    lengths, routes = [50, 3, 37], {}
    y, _ = mixer(x, packed_context(x, lengths, want_state=want_state, routes=routes))
    assert isinstance(routes[0], list) is want_state
    again, _ = mixer(x, packed_context(x, lengths, want_state=want_state, routes=routes))
    assert torch.equal(y, again)
    alone = []
    for index, piece in enumerate(x.split(lengths, 1)):
        own = {0: routes[0][index]} if want_state else {}
        alone.append(mixer(piece, Context.of(piece, routes=own))[0])
    alone = torch.cat(alone, 1)
    torch.testing.assert_close(y, alone, atol=1e-5, rtol=0)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, alone), 2e-5)


def test_routes_are_kept_by_layer():
    first = build("kvm", site=Site(HIDDEN, 0, 4))
    later = build("kvm", site=Site(HIDDEN, 2, 4, first_of_kind=False))
    x, routes = tokens(1, 40), {}
    context = Context.of(x, routes=routes)
    later(first(x, context)[0], context)
    assert routes.keys() == {0, 2}


def repeated_words(count):
    """`[1, count, C]` with exact repeats, as text has."""
    words = torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(3))
    return words[torch.randint(0, 12, (count,), generator=torch.Generator().manual_seed(4))][None]


def assert_changed_at_near_ties_only(found, expected, chunk):
    """Each head's first changed decision was a near tie; those after it follow from it."""
    assert found.shape == expected.slot.shape
    assert float(expected.margin.min()) < 1e-4  # the text has ties
    for head in range(found.shape[1]):
        changed = (found != expected.slot)[0, head].nonzero()
        if len(changed):
            update = int(changed[0]) // chunk * chunk
            assert float(expected.margin[0, head, update : update + chunk].min()) < 1e-4


@pytest.mark.parametrize("packed", [False, True])
def test_free_routes_differ_only_at_near_ties(monkeypatch, packed):
    """Text cut into other calls, or packed with others in a row."""
    operator = functools.partial(module.kvm_attention, want_margins=True)
    monkeypatch.setattr(module, "kvm_attention", operator)
    mixer, x = build("kvm", torch.float32, sinks=1, state_bias=False), repeated_words(400)
    chunk, lengths = mixer.spec.chunk, [130, 3, 267] if packed else [400]
    alone = []
    with torch.no_grad():
        for piece in x.split(lengths, 1):
            routes = {}
            mixer(piece, Context.of(piece, routes=routes))
            alone.append(routes[0])
        if packed:
            routes = {}
            mixer(x, packed_context(x, lengths, want_state=False, routes=routes))
            found = routes[0].slot.split([one.slot.shape[2] for one in alone], 2)
        else:
            state, slots = None, []
            for piece in x.split([7, *[1] * 40, 100, 253], 1):
                routes = {}
                _, state = mixer(piece, Context.of(piece, routes=routes), state)
                slots.append(routes[0].slot)
            found = [torch.cat(slots, 2)]
    for one, expected in zip(found, alone, strict=True):
        if one.shape[2] > chunk:  # the first chunk has no choice
            assert_changed_at_near_ties_only(one, expected, chunk)
        else:
            assert torch.equal(one, expected.slot)


# Statistics


def test_statistics_are_left_under_the_layers_index():
    mixer = build("kvm", site=Site(HIDDEN, 3, 5))
    x, found = tokens(2, 100), {}
    y, state = mixer(x, Context.of(x, statistics=found))
    assert found.keys() == {
        f"3/{name}"
        for name in ("slots", "tokens_per_slot", "gate_mean", "gate_std", "state_mass", "window_mass")
    }
    gate = module.positive_gate(mixer.merge_gate(x))
    torch.testing.assert_close(found["3/gate_mean"], gate.detach().mean())
    torch.testing.assert_close(found["3/gate_std"], gate.detach().std())
    assert float(found["3/slots"]) == state.operator.slots
    assert float(found["3/state_mass"] + found["3/window_mass"]) == pytest.approx(1)
    assert not any(value.requires_grad for value in found.values())
    assert torch.equal(y, mixer(x)[0])


# Accounts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": "fixed"},
        {"budget_factor": 50.0},
        {"window_chunks": 1, "budget": "saturation"},
        NO_GATES,
    ],
)
def test_flops_are_those_of_visible_pairs_and_compared_slots(changes):
    mixer = build("kvm", **changes)
    spec, size, previous = mixer.spec, mixer.head_dim, 0
    linear = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, torch.nn.Linear))
    for length in (1, 8, 15, 16, 17, 40, 65):
        _, twin = kvm_layer(mixer, tokens(1, length))
        found = mixer.flops_per_token(length)
        pairs = [visible(spec, twin, t) for t in range(length)]
        expected = 2 * linear + 4 * mixer.num_heads * size * sum(pairs) / length
        assert found.differentiable == pytest.approx(expected)
        expected = 2 * linear + 4 * mixer.num_heads * size * pairs[-1]
        assert mixer.flops_at(length - 1).differentiable == expected
        compared = 0
        for number, (before, after) in enumerate(zip(*sizes(spec, length), strict=True), 1):
            assert (number + spec.window_chunks) * spec.chunk < length
            compared += spec.chunk * after if after - before < spec.chunk else 0
        assert found.routing == pytest.approx(2 * mixer.kv_width * compared / length)
        assert found.routing * length >= previous
        previous = found.routing * length


def visible(spec, twin, position):
    """Keys and slots that a query sees; slots are the founders among the tokens before its window."""
    chunk = position // spec.chunk
    begin = max(0, chunk + 1 - spec.window_chunks) * spec.chunk
    return position + 1 - begin + int(twin.founds[0, 0, :begin].sum())


def sizes(spec, length):
    """Slots before and after each update with a choice that reading `length` tokens makes."""
    count = max(0, -(-length // spec.chunk) - spec.window_chunks)
    every = [spec.slots_after(number) for number in range(count)]
    return every[:-1], every[1:]


def test_routing_is_spread_over_the_chunk_that_follows_it():
    mixer = build("kvm")
    steps = [mixer.flops_at(t).routing for t in range(64)]
    assert steps[:24] == [0.0] * 24  # update 0 has no choice
    assert steps[24] > 0
    assert steps[24:32] == [steps[24]] * 8
    assert sum(steps) == pytest.approx(mixer.flops_per_token(64).routing * 64)


def test_the_papers_defaults():
    options = KVMOptions()
    assert (options.chunk, options.window_chunks, options.sinks) == (256, 2, 1)
    with torch.device("meta"):
        mixer = KVM(options, Site(768))
    assert (mixer.num_heads, mixer.head_dim, mixer.rotary_dim) == (6, 128, 64)
    assert mixer.spec.slots_after(0) == 256
    assert mixer.spec.slots_after(30) == int(16 * 8192**0.5)  # the update that token 8192 brings about
    slot, token = 6 * 257 * 4, 6 * (2 * 128 * 2 + 4)
    assert mixer.state_bytes(8192, 2) == int(16 * 7936**0.5) * slot + 512 * token + 3 * 768 * 2


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_dim": 0}, "rotary_dim is 0; allowed: even numbers above 0 and below head_dim"),
        ({"chunk": 0}, "chunk is 0"),
        ({"window_chunks": 0}, "window_chunks is 0"),
        ({"sinks": 300}, r"sinks is 300; allowed: a whole number from 0 to chunk \(256\)"),
        ({"budget": "linear"}, "budget is 'linear'; allowed: fixed, power_law, saturation"),
        ({"budget_minimum": 0}, "budget_minimum is 0; allowed: a whole number of 1 or more"),
        ({"budget_factor": -1}, "budget_factor is -1; allowed: a number above 0"),
        ({"budget_factor": float("inf")}, "budget_factor is inf"),
        ({"budget_exponent": 1.5}, "budget_exponent is 1.5; allowed: a number from 0 to 1"),
        ({"budget_saturation": 0}, "budget_saturation is 0"),
        ({"budget_round": 0}, "budget_round is 0"),
        ({"budget_max_chunks": 0}, "budget_max_chunks is 0; allowed: a whole number of 1 or more, or null"),
        ({"gate_keys": 1}, "gate_keys is 1; allowed: true, false"),
        ({"values": "norm"}, "values is 'norm'; allowed: radius, counts, reference_counts"),
        ({"values": "reference_counts"}, "reference_counts"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(LayerError, match=message):
        KVMOptions(**options)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (2, None), (3, None)])
def test_rotary_must_leave_some_of_the_head(head_dim, rotary_dim):
    options = KVMOptions(num_heads=4, head_dim=head_dim, rotary_dim=rotary_dim)
    for attempt in (KVM.check, mixer_class("kvm")):
        with pytest.raises(LayerError, match=f"above 0 and below head_dim {head_dim}"):
            attempt(options, Site(HIDDEN))
