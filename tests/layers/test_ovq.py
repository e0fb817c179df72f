"""OVQ: the stored vectors, the plain twin, routes, groups of chunks, state, start values, accounts."""

import json
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid.layers import Context, LayerError, Site, mixer_class
from hybrid.layers.ovq import chunks as chunk_module
from hybrid.layers.ovq.attention import OVQState, Routes, ovq_attention
from hybrid.layers.ovq.dictionary import Centroids, size_after
from hybrid.layers.ovq.mixer import OVQ, OVQLayerState, OVQOptions
from hybrid.layers.softmax import force_plain
from hybrid.verify.mixers import build_layer, stored_state

from ..parity import vectors
from ..parity.ovq_reference import project, reference, sizes
from .mixers import (
    HIDDEN,
    assert_same_gradients,
    assert_same_state,
    build,
    gradients,
    in_pieces,
    packed_context,
    tokens,
)

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 100)


# Vectors


@vectors.parametrize("ovq")
@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_layer_vectors_hold(case, plain):
    with force_plain(plain):
        vectors.assert_holds(case)


@vectors.parametrize("ovq")
def test_vectors_hold_when_decoding(case):
    stored = case.tensors()
    mixer = build_layer(case, stored)
    state, out = None, []
    with torch.no_grad():
        for t, x in enumerate(stored["x"].split(1, 1)):
            firsts = {"ovq": stored["v_first"][:, t : t + 1]} if "v_first" in stored else {}
            y, state = mixer(x, Context.of(x, first_values=firsts), state)
            out.append(y)
    states = {f"state.{name}": x for name, x in stored_state(state).items()}
    vectors.assert_near(case, stored, {"y": torch.cat(out, 1)} | states)


def test_stored_schedules_hold():
    index = vectors.FOLDERS[0] / "mixers_index.json"
    for case in json.loads(index.read_text())["ovq_dictionary_schedules"]:
        chunk, limit = case["chunk"], case["max_centroids"]
        whole = case["seq_len"] // chunk  # the last size is of a chunk that never enters, if partial
        assert [size_after(c, chunk, limit) for c in range(whole + 1)] == case["sizes"][: whole + 1]


# The operator


def test_the_schedule_saturates_and_never_outgrows_a_chunk():
    assert [size_after(c, 256, 1024) for c in range(6)] == [0, 204, 341, 438, 512, 568]
    for chunk, limit in ((1, 4), (7, 100), (256, 1024), (64, 5)):
        found = [size_after(c, chunk, limit) for c in range(300)]
        assert found == sizes(299 * chunk, chunk, limit)
        assert all(0 <= b - a <= chunk for a, b in pairwise(found))
        assert found[-1] <= limit


def operands(length, heads=2, size=8, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [x.to(dtype).requires_grad_() for x in (3 * q, k, v)]


def slopes(y, given):
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return torch.autograd.grad((y * weight).sum(), given)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("chunk", "limit"), [(8, 12), (8, 200), (1, 4), (3, 1), (16, 6)])
def test_it_is_the_plain_twin(length, chunk, limit):
    """fla-org/flash-linear-attention#88: values, choices, final state and gradients."""
    given = operands(length, batch=1 if length > 20 else 2)
    expected = reference(*given, chunk, limit)
    y, state, routes = ovq_attention(*given, chunk=chunk, max_centroids=limit)
    assert torch.equal(routes.slot.long(), expected.slots)
    torch.testing.assert_close(y, expected.y)
    torch.testing.assert_close(state.centroid_k, expected.keys)
    torch.testing.assert_close(state.centroid_v, expected.values)
    torch.testing.assert_close(state.counts, expected.counts)
    assert state.pending_k.shape[1] == length % chunk
    for one, two in zip(slopes(y, given), slopes(expected.y, given), strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=0)


def test_gradients_flow_through_a_carried_dictionary():
    given = operands(60)
    y, _, _ = ovq_attention(*given, chunk=8, max_centroids=12)
    state, outs = None, []
    for piece in zip(*(x.split([20, 1, 3, 36], 1) for x in given), strict=True):
        out, state, _ = ovq_attention(*piece, chunk=8, max_centroids=12, state=state)
        outs.append(out)
    for one, two in zip(slopes(torch.cat(outs, 1), given), slopes(y, given), strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=0)


@pytest.mark.parametrize("lengths", [(), (30, 3, 8, 41, 16, 1)])
def test_groups_of_chunks_join_without_a_seam(monkeypatch, lengths):
    given = operands(sum(lengths) or 77, batch=1)
    options = {"chunk": 8, "max_centroids": 12, "lengths": lengths}
    y, _, _ = ovq_attention(*given, **options)
    expected = slopes(y, given)
    monkeypatch.setattr(chunk_module, "GROUP_BYTES", {"cpu": 1})
    monkeypatch.setattr(chunk_module, "SLACK", 0.0)
    again, _, _ = ovq_attention(*given, **options)
    torch.testing.assert_close(again, y)
    for one, two in zip(slopes(again, given), expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=0)


def test_packed_documents_are_each_alone():
    lengths = [30, 3, 8, 41, 16, 1, 9]
    given = operands(sum(lengths), batch=1)
    y, state, routes = ovq_attention(*given, chunk=8, max_centroids=12, lengths=lengths)
    assert state is None
    alone = [
        ovq_attention(*piece, chunk=8, max_centroids=12)
        for piece in zip(*(x.split(lengths, 1) for x in given), strict=True)
    ]
    expected = torch.cat([out for out, _, _ in alone], 1)
    torch.testing.assert_close(y, expected)
    assert torch.equal(routes.slot, torch.cat([one.slot for _, _, one in alone], 2))
    for one, two in zip(slopes(y, given), slopes(expected, given), strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=0)
    again, _, _ = ovq_attention(*given, chunk=8, max_centroids=12, lengths=lengths, routes=routes)
    torch.testing.assert_close(again, y)


def test_given_routes_are_taken_by_position():
    given = operands(60)
    _, _, routes = ovq_attention(*given, chunk=8, max_centroids=12)
    other = [x.detach() for x in operands(60)]
    other[1] = torch.nn.functional.normalize(other[1].roll(1, 1), dim=-1)  # would go elsewhere
    expected = reference(*other, 8, 12, slots=routes.slot.long())
    state, outs = None, []
    for piece in zip(*(x.split([5, 30, 1, 24], 1) for x in other), strict=True):
        out, state, made = ovq_attention(*piece, chunk=8, max_centroids=12, state=state, routes=routes)
        assert torch.equal(made.slot, routes.slot[..., made.first : made.first + made.slot.shape[2]])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), expected.y)
    assert not torch.equal(reference(*other, 8, 12).slots, expected.slots)
    first_half = Routes(routes.slot[..., :16])
    with pytest.raises(LayerError, match="for 16 tokens from 0 on; this call needs them for 8 from 16 on"):
        ovq_attention(*other, chunk=8, max_centroids=12, routes=first_half)


def test_one_centroid_stands_for_as_many_equal_keys():
    key, value = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([2.0, 0.0, 0.0, 1.0])
    k = torch.cat((key.expand(8, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]])))[None, :, None]
    v = torch.cat((value.expand(8, 4), torch.zeros(1, 4)))[None, :, None]
    q = torch.zeros_like(k)
    y, state, _ = ovq_attention(q, k, v, chunk=8, max_centroids=1000)
    assert state.counts[0, 0].sum() == 8
    torch.testing.assert_close(y[0, 8, 0], 8 / 9 * value)  # eight tokens in seven centroids, and itself


def test_the_log_of_a_count_survives_16_bits():
    counts = torch.tensor([3.0, 117.0, 1000.0, 0.0])[:, None]
    keys, _ = chunk_module.readable(Centroids(torch.zeros(1, 1, 4, 16), counts[None, None]), torch.bfloat16)
    assert keys.shape == (1, 4, 1, 16)
    bias = keys[0, :, 0, 8:10].double().sum(-1)
    torch.testing.assert_close(bias[:3], counts[:3, 0].double().log(), atol=5e-5, rtol=0)
    assert bias[3].exp() == 0


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = operands(8)
    with pytest.raises(LayerError, match="do not fit together"):
        ovq_attention(q, k[:, :4], v, chunk=8, max_centroids=4)
    with pytest.raises(LayerError, match="do not fit together"):
        ovq_attention(q[0], k[0], v[0], chunk=8, max_centroids=4)
    with pytest.raises(LayerError, match=r"documents of \(3, 4\) tokens"):
        ovq_attention(q, k, v, chunk=8, max_centroids=4, lengths=(3, 4))


# The layer


@pytest.mark.parametrize("length", [1, 8, 17, 60])
@pytest.mark.parametrize("changes", [{}, {"token_shift": False}, {"value_residual": False}])
def test_the_layer_matches_its_twin(length, changes):
    mixer = build("ovq", site=Site(HIDDEN, 2, 5, first_of_kind=False), **changes)
    x, first = tokens(2, length).requires_grad_(), tokens(2, length, seed=5)
    context = Context.of(x, first_values={"ovq": first})
    p = dict(mixer.named_parameters())
    q, k, v = project(x, p, 4, first if mixer.options.value_residual else None)
    expected = reference(q, k, v, 8, 12).y.flatten(-2) @ p["c_proj.weight"].T
    y, _ = mixer(x, context)
    torch.testing.assert_close(y, expected)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected), 1e-10)


def test_the_first_layer_shares_plain_values_of_the_embedding():
    mixer, x, embedding = build("ovq", site=Site(HIDDEN, 1, 4)), tokens(2, 30), tokens(2, 30, seed=8)
    context = Context.of(x, embedding=embedding)
    mixer(x, context)
    torch.testing.assert_close(context.first_values["ovq"], embedding @ mixer.c_v.weight.T)


def test_routes_are_recorded_and_replayed_through_the_context():
    """Packed with state: a list, one entry per document."""
    mixer, x, lengths = build("ovq"), tokens(1, 60), [40, 20]
    routes: dict = {}
    y, states = mixer(x, packed_context(x, lengths, routes=routes))
    assert [one.slot.shape for one in routes[0]] == [(1, 4, 40), (1, 4, 16)]
    other = x + 0.5 * tokens(1, 60, seed=9)
    replayed: dict = {0: list(routes[0])}
    mixer(other, packed_context(other, lengths, routes=replayed))
    assert all(a is b for a, b in zip(replayed[0], routes[0], strict=True))
    again, _ = mixer(x, packed_context(x, lengths, routes=routes, want_state=True))
    torch.testing.assert_close(again, y)
    assert [state.position for state in states] == lengths


def test_the_dictionary_is_wide_and_pending_tokens_are_narrow():
    mixer, x = build("ovq", torch.bfloat16), tokens(2, 21, torch.bfloat16)
    _, state = in_pieces(mixer, x, [16, 4, 1])
    inner = state.operator
    assert {inner.centroid_k.dtype, inner.centroid_v.dtype, inner.counts.dtype} == {torch.float32}
    assert inner.counts.sum() == 2 * 4 * 16
    assert inner.pending_k.shape == inner.pending_v.shape == (2, 5, 4, 8)
    assert inner.pending_k.dtype == torch.bfloat16
    assert mixer.empty_state(3).operator.counts.shape == (3, 4, 12, 1)


def test_a_saved_state_continues():
    mixer, x = build("ovq"), tokens(1, 50)
    with torch.no_grad():
        _, state = in_pieces(mixer, x[:, :29], [20, *[1] * 9])
        kept = {name: tensor.clone() for name, tensor in state.tensors().items()}
        inner = {n.removeprefix("operator."): t for n, t in kept.items() if n.startswith("operator.")}
        outer = {n: t for n, t in kept.items() if not n.startswith("operator.")}
        loaded = OVQLayerState(29, **outer, operator=OVQState(29, **inner))
        one, after = mixer(x[:, 29:], None, loaded)
        two, expected = mixer(x[:, 29:], None, state)
    torch.testing.assert_close(one, two)
    assert_same_state(after, expected, 1e-12)


def test_start_values():
    mixer = OVQ(OVQOptions(num_heads=4), Site(64, 1, 4))
    assert torch.equal(mixer.beta, torch.ones(4))
    assert not mixer.c_proj.weight.any()
    i = torch.arange(64)
    for name, power in (("x_q", 0.2), ("x_k", 0.7), ("x_v", 0.7)):
        expected = 1 - (i / 64) ** (power * 0.75)
        torch.testing.assert_close(mixer.get_parameter(name).detach(), expected)
    torch.testing.assert_close(mixer.v_gate0.detach(), 0.73 - 0.4 * (i / 63 - 0.5))
    assert not mixer.v_gate1.weight.any()
    assert {"beta", "x_q", "x_k", "x_v", "v_gate0"} == mixer.no_decay()
    assert 0 < float(mixer.c_q.weight.detach().abs().max()) <= 1 / 8


def test_options_are_checked():
    for name in ("chunk", "max_centroids", "num_heads", "head_dim"):
        with pytest.raises(LayerError, match=f"{name} is 0"):
            OVQOptions(**{name: 0})
    with pytest.raises(LayerError, match="token_shift is 1"):
        OVQOptions(token_shift=1)
    with pytest.raises(TypeError):
        OVQOptions(rotary_dim=2)
    with pytest.raises(LayerError, match="no multiple of num_heads 5"):
        OVQ(OVQOptions(num_heads=5), Site(32))
    assert mixer_class("ovq") is OVQ


def counted(mixer, x, state=None):
    with FlopCounterMode(display=False) as counter, torch.no_grad(), force_plain():
        _, state = mixer(x, None, state)
    return counter.get_total_flops(), state


@pytest.mark.parametrize("size", [6, 14])
def test_flops_are_those_counted_in_decoding(size):
    """With its two further features a head has a multiple of 8; the accounts do not count those."""
    mixer = build("ovq", torch.float32, head_dim=size, site=Site(HIDDEN))
    x, state = tokens(1, 40, torch.float32), None
    chunk, heads = 8, 4
    for t in range(40):
        found, state = counted(mixer, x[:, t : t + 1], state)
        flops = mixer.flops_at(t)
        number = t // chunk
        visible = mixer._size(number) + t % chunk + 1
        extra = 4 * heads * 2 * visible if mixer._size(number) else 0
        routing = flops.routing * chunk if t % chunk == chunk - 1 else 0
        assert found - extra == pytest.approx(flops.differentiable + routing), t


def test_flops_of_routing_are_spread_over_the_chunk():
    mixer = build("ovq")
    for length in (8, 40, 120):
        whole = mixer.flops_per_token(length)
        assert whole.routing == pytest.approx(sum(mixer.flops_at(t).routing for t in range(length)) / length)
    assert mixer.flops_per_token(7).routing == 0
    assert mixer.flops_per_token(8).routing == 2 * 7 * 32 / 8  # with the chunk's first key
