"""The q, k, v front end: options, order of its steps, start values, value residual over layers."""

import math

import pytest
import torch

from hybrid.layers import Context, LayerError, Site
from hybrid.layers.attention import FullAttention
from hybrid.layers.heads import ProjectionOptions

from ..parity.attention_reference import mix
from .mixers import HIDDEN, assert_same_gradients, build, gradients, in_pieces, packed_context, tokens

ON_OFF = {"token_shift": False, "value_residual": False, "qk_norm": "none", "qkv_bias": True}


@pytest.mark.parametrize(
    ("options", "hidden", "expected"),
    [
        ({}, 768, (6, 6, 128)),
        ({}, 1024, (8, 8, 128)),
        ({"head_dim": 64}, 768, (12, 12, 64)),
        ({"num_heads": 4}, 32, (4, 4, 8)),
        ({"num_heads": 4, "num_kv_heads": 2, "head_dim": 10}, 32, (4, 2, 10)),
    ],
)
def test_heads_follow_from_the_hidden_size(options, hidden, expected):
    assert FullAttention.heads(ProjectionOptions(**options), hidden)[:3] == expected
    assert FullAttention.value_width(ProjectionOptions(**options), Site(hidden)) == expected[1] * expected[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "hidden_size 32 is no multiple of head_dim 128"),
        ({"num_heads": 5}, "hidden_size 32 is no multiple of num_heads 5"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; allowed: divisors of num_heads 4"),
        ({"num_heads": 2, "num_kv_heads": 4}, "num_kv_heads is 4; allowed: divisors of num_heads 2"),
        ({"num_heads": 4, "rotary_dim": 10}, "rotary_dim is 10; allowed: even numbers up to head_dim 8"),
    ],
)
def test_heads_that_do_not_fit_are_refused_before_anything_is_allocated(options, message):
    for attempt in (FullAttention.check, FullAttention):
        with pytest.raises(LayerError, match=message):
            attempt(ProjectionOptions(**options), Site(HIDDEN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads is 0; allowed: a whole number of 1 or more, or null"),
        ({"head_dim": "8"}, "head_dim is '8'"),
        ({"rotary_dim": 3}, "rotary_dim is 3; allowed: an even number, 0 or more, or null"),
        ({"rotary_base": 0}, "rotary_base is 0; allowed: a number above 0"),
        ({"rotary_base": float("nan")}, "rotary_base is nan"),
        ({"rotary_style": "llama"}, "rotary_style is 'llama'; allowed: paper, standard"),
        ({"qk_norm": "l2"}, "qk_norm is 'l2'; allowed: layernorm, rmsnorm, none"),
        ({"token_shift": 1}, "token_shift is 1; allowed: true, false"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(LayerError, match=message):
        ProjectionOptions(**options)


@pytest.mark.parametrize("layer", [0, 3])
def test_start_values(layer):
    torch.manual_seed(0)
    mixer = FullAttention(ProjectionOptions(num_heads=4, num_kv_heads=2, qkv_bias=True), Site(64, layer, 4))
    bound = 1 / math.sqrt(64)
    for linear in (mixer.c_q, mixer.c_k, mixer.c_v):
        assert bound * 0.98 < float(linear.weight.detach().abs().max()) <= bound
        assert float(linear.weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert not linear.bias.any()
    assert not mixer.c_proj.weight.any()
    assert not mixer.v_gate1.weight.any()
    assert mixer.v_gate2.weight.any()
    assert mixer.v_gate0[[0, -1]].tolist() == pytest.approx([0.93, 0.53])
    depth = 1 - layer / 4
    for mix_, power in ((mixer.x_q, 0.2), (mixer.x_k, 0.7), (mixer.x_v, 0.7)):
        assert float(mix_[0].detach()) == 1
        width = mix_.numel()
        assert float(mix_[width // 2].detach()) == pytest.approx(1 - 0.5 ** (power * depth), rel=1e-5)
    assert torch.equal(mixer.ln_q.weight, torch.ones(16))
    assert torch.equal(mixer.ln_k.bias, torch.zeros(16))


def test_parts_that_are_off_have_no_parameters():
    names = set(dict(build("full", **ON_OFF).named_parameters()))
    assert names == {
        "c_q.weight", "c_k.weight", "c_v.weight", "c_q.bias", "c_k.bias", "c_v.bias", "c_proj.weight"
    }  # fmt: skip
    assert "ln_q.bias" not in dict(build("full", qk_norm="rmsnorm").named_parameters())


@pytest.mark.parametrize("style", ["paper", "standard"])
@pytest.mark.parametrize("qk_norm", ["none", "rmsnorm"])
def test_llama_like_options_stream_and_pack_too(style, qk_norm):
    options = ON_OFF | {"rotary_style": style, "qk_norm": qk_norm, "rotary_dim": 8}
    mixer, x = build("full", **options), tokens(1, 30)
    y, _ = mixer(x)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(mixer, x, [7, *[1] * 5, 18])[0], y, atol=1e-10, rtol=0)
    packed, _ = mixer(x, packed_context(x, [10, 20]))
    alone = torch.cat([mixer(piece)[0] for piece in x.split([10, 20], 1)], 1)
    torch.testing.assert_close(packed, alone, atol=1e-10, rtol=0)


def test_standard_rotary_attention_equals_torch():
    """Against scaled_dot_product_attention with rotate-half written out."""
    options = ON_OFF | {"rotary_style": "standard", "rotary_dim": 8, "num_kv_heads": 4}
    mixer, x = build("full", torch.float32, **options), tokens(2, 20, torch.float32)
    q, k, v = (f(x).view(2, 20, 4, 8).transpose(1, 2) for f in (mixer.c_q, mixer.c_k, mixer.c_v))
    angles = torch.outer(torch.arange(20.0), 10000.0 ** (-torch.arange(0, 8, 2) / 8)).repeat(1, 2)

    def turn(z):
        low, high = z.chunk(2, -1)
        return z * angles.cos() + torch.cat((-high, low), -1) * angles.sin()

    y = torch.nn.functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
    expected = mixer.c_proj(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(x)[0], expected, atol=1e-5, rtol=0)


# The value residual over layers


def pair(first_layer: int = 1):
    """The first layer of a kind and a later one."""
    sites = (Site(HIDDEN, first_layer, 6), Site(HIDDEN, first_layer + 2, 6, first_of_kind=False))
    return [build("full", seed=seed, site=site) for seed, site in enumerate(sites)]


def test_later_layers_mix_in_the_values_of_the_first():
    first, later = pair(0)
    x, x2 = tokens(2, 20, seed=1), tokens(2, 20, seed=2)
    context = Context.of(x)
    y, _ = first(x, context)
    torch.testing.assert_close(y, mix(first, x), atol=1e-6, rtol=0)  # an identity in layer 0
    shared = x @ first.c_v.weight.t()
    torch.testing.assert_close(context.first_values["full"], shared)
    torch.testing.assert_close(later(x2, context)[0], mix(later, x2, shared), atol=1e-6, rtol=0)


def test_a_first_layer_that_is_not_layer_0_takes_its_values_from_the_embedding():
    first, later = pair(1)
    x, x2, embedding = (tokens(2, 20, seed=s).requires_grad_() for s in (1, 2, 3))
    context = Context.of(x, embedding=embedding)
    shared = embedding @ first.c_v.weight.t()
    y = first(x, context)[0] + later(x2, context)[0]
    expected = mix(first, x, shared) + mix(later, x2, shared)
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=0)
    assert float((mix(first, x) - mix(first, x, shared)).detach().abs().max()) > 1e-3
    for mixer in (first, later):
        assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected), 1e-6)
    weight = torch.randn_like(y)
    one, two = (torch.autograd.grad((z * weight).sum(), embedding)[0] for z in (y, expected))
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def test_the_value_residual_streams_and_packs():
    first, later = pair(1)
    x, embedding = tokens(1, 30, seed=1), tokens(1, 30, seed=3)

    def run(x, context, states=(None, None)):
        y, one = first(x, context, states[0])
        z, two = later(y, context, states[1])
        return z, (one, two)

    whole, _ = run(x, Context.of(x, embedding=embedding))
    states, found = (None, None), []
    for piece, e in zip(x.split([7, 1, 22], 1), embedding.split([7, 1, 22], 1), strict=True):
        z, states = run(piece, Context.of(piece, embedding=e), states)
        found.append(z)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-10, rtol=0)
    alone = [
        run(p, Context.of(p, embedding=e))[0]
        for p, e in zip(x.split(15, 1), embedding.split(15, 1), strict=True)
    ]
    for want_state in (True, False):
        context = packed_context(x, [15, 15], embedding=embedding, want_state=want_state)
        torch.testing.assert_close(run(x, context)[0], torch.cat(alone, 1), atol=1e-10, rtol=0)
        assert context.first_values["full"].shape == (1, 30, 16)


def test_a_later_layer_without_the_first_one_says_so():
    _, later = pair()
    with pytest.raises(LayerError, match=r"layer 3 \(full\) needs the first full layer's values"):
        later(tokens(1, 4))


def test_values_of_another_width_are_refused():
    first, _ = pair()
    later = build("full", site=Site(HIDDEN, 3, 6, first_of_kind=False), num_kv_heads=4)
    x = tokens(1, 4)
    context = Context.of(x)
    first(x, context)
    with pytest.raises(LayerError, match=r"layer 3 \(full\) has values of width 32, .* of width 16"):
        later(x, context)


def test_the_shared_values_cost_a_second_projection_only_beyond_layer_0():
    costs = [
        build("full", site=Site(HIDDEN, i, 6, f)).flops_at(0).forward
        for i, f in ((0, True), (1, True), (2, False))
    ]
    assert costs[1] - costs[0] == 2 * HIDDEN * 16
    assert costs[2] == costs[0]
