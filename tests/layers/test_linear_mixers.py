"""Gated DeltaNet, Kimi Delta Attention and Mamba-2 against the stored vectors and their stepwise twins."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid.layers import LayerError, Site, mixer_class
from hybrid.layers.linear.delta_rule import gated_delta_rule
from hybrid.layers.linear.ssd import ssd
from hybrid.verify.mixers import run_layer, run_operator

from ..parity import vectors
from ..parity.linear_reference import delta_steps, ssd_steps
from ..parity.twins import linear_layer
from .mixers import assert_same_gradients, build, gradients, tokens

KINDS = ("gated_deltanet", "kimi_delta", "mamba2")
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 65, 100)  # fla-org/flash-linear-attention#88
VARIANTS = [
    ("gated_deltanet", {"num_v_heads": None}),
    ("gated_deltanet", {"num_v_heads": 8, "allow_neg_eigval": True, "conv_bias": True, "conv_size": 3}),
    ("gated_deltanet", {"use_gate": False, "use_short_conv": False, "norm_eps": 1e-2}),
    ("gated_deltanet", {"conv_size": 1, "num_heads": 1, "head_k_dim": 5, "head_v_dim": 3}),
    ("kimi_delta", {"num_v_heads": None}),
    ("kimi_delta", {"num_v_heads": 8, "allow_neg_eigval": True, "conv_bias": True}),
    ("kimi_delta", {"lower_bound": -5.0, "head_k_dim": 6, "head_v_dim": 10}),
    ("mamba2", {"state_size": 5, "n_groups": 1}),
    ("mamba2", {"state_size": 8, "n_groups": 2, "conv_bias": False, "conv_size": 2, "expand": 3}),
]
every_variant = pytest.mark.parametrize(("kind", "changes"), VARIANTS)
both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-6)], ids=["fp32", "fp64"]
)


@both_dtypes
@vectors.parametrize("gdn", "kda", "mamba2")
def test_layer_vectors_hold(case, dtype, tolerance):
    tensors = vectors.in_dtype(case, dtype)
    vectors.assert_within(case, tensors, run_layer(case, tensors), tolerance)


@both_dtypes
@vectors.parametrize("gdn_op", "kda_op")
def test_operator_vectors_hold(case, dtype, tolerance):
    tensors = vectors.in_dtype(case, dtype)
    vectors.assert_within(case, tensors, run_operator(case, tensors), tolerance)


@every_variant
@pytest.mark.parametrize("length", LENGTHS)
def test_a_layer_equals_its_stepwise_twin(kind, changes, length):
    """fla-org/flash-linear-attention#88: values, final state and gradients, from a state that is not zero."""
    mixer, x = build(kind, **changes), tokens(2, length).requires_grad_()
    start = {n: torch.randn_like(t) for n, t in mixer.empty_state(2).tensors().items()}
    state = mixer.empty_state(2).map(torch.zeros_like)
    for name, tensor in start.items():
        setattr(state, name, tensor)
    y, after = mixer(x, None, state)
    expected, wanted = linear_layer(mixer, x, start)
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=1e-10)
    assert after.tensors().keys() == wanted.keys()
    for name, tensor in after.tensors().items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-10, rtol=1e-10, msg=name)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_equal_the_whole_from_a_random_state_in_fp32(kind):
    """fla-org/flash-linear-attention#494: 256 tokens at once, in halves, and unevenly; the state's axes are
    those documented."""
    mixer, x = build(kind, torch.float32), tokens(2, 256, torch.float32)
    start = mixer.empty_state(2).map(torch.randn_like)
    whole, after = mixer(x, None, start)
    for cuts in ([128, 128], [200, 56]):
        state, outs = start, []
        for piece in x.split(cuts, 1):
            y, state = mixer(piece, None, state)
            outs.append(y)
        torch.testing.assert_close(torch.cat(outs, 1), whole, atol=1e-4, rtol=1e-4)
        for name, tensor in state.tensors().items():
            torch.testing.assert_close(tensor, after.tensors()[name], atol=1e-4, rtol=1e-4)
    expected, wanted = linear_layer(mixer, x, start.tensors())
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert {n: t.shape for n, t in wanted.items()} == {n: t.shape for n, t in after.tensors().items()}


def extreme(channels: bool, dtype: torch.dtype):
    """q, k, v, g, beta whose log decays are mixtures of 0, -0.01, -1, -20, -60 and -1000."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (
        draw(2, 100, 2, 8),
        torch.nn.functional.normalize(draw(2, 100, 2, 8), dim=-1),
        draw(2, 100, 4, 6),
    )
    rates = torch.tensor([0.0, -0.01, -1.0, -20.0, -60.0, -1000.0], dtype=torch.float64)
    shape = (2, 100, 4, 8) if channels else (2, 100, 4)
    g = rates[torch.randint(6, shape, generator=generator)]
    beta = 2 * torch.rand(2, 100, 4, generator=generator, dtype=torch.float64)
    return [z.to(dtype).requires_grad_() for z in (q, k, v, g, beta)]


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=str)
def test_any_decay_is_exact(channels, dtype, tolerance):
    inputs = extreme(channels, torch.float64)
    expected, state = delta_steps(*inputs)
    weight, weight_state = torch.randn_like(expected), torch.randn_like(state)
    wanted = torch.autograd.grad((expected * weight).sum() + (state * weight_state).sum(), inputs)
    low = extreme(channels, dtype)
    y, after = gated_delta_rule(*low)
    found = torch.autograd.grad((y * weight).sum() + (after * weight_state).sum(), low)
    for one, two in zip((y, after, *found), (expected, state, *wanted), strict=True):
        assert float((one - two).detach().abs().max()) <= tolerance * float(two.detach().abs().max())


@pytest.mark.parametrize("bound", [0.0, -1e-3, -1.0, -3.7, -3.8, -30.0, -1e4])
def test_a_whole_sequence_of_one_decay_is_finite_and_exact(bound):
    for channels in (False, True):
        q, k, v, g, beta = extreme(channels, torch.float32)
        g = torch.full_like(g, bound).requires_grad_()
        y, state = gated_delta_rule(q, k, v, g, beta)
        expected, wanted = delta_steps(*(z.double() for z in (q, k, v, g, beta)))
        for one, two in ((y, expected), (state, wanted)):
            assert float((one - two).detach().abs().max()) <= 3e-6 * float(two.detach().abs().max())
        for gradient in torch.autograd.grad(y.sum() + state.sum(), (q, k, v, g, beta)):
            assert torch.isfinite(gradient).all()


def test_ssd_equals_its_steps_for_any_decay():
    generator = torch.Generator().manual_seed(3)
    x, b, c = (torch.randn(2, 100, *s, generator=generator).double() for s in ((4, 6), (2, 5), (2, 5)))
    rates = torch.tensor([0.0, -0.01, -1.0, -20.0, -60.0, -1000.0], dtype=torch.float64)
    g = rates[torch.randint(6, (2, 100, 4), generator=generator)]
    inputs = [z.requires_grad_() for z in (x, b, c, g)]
    start = torch.randn(2, 4, 6, 5, generator=generator).double().requires_grad_()
    expected, wanted = ssd_steps(*inputs, start)
    y, state = ssd(*inputs, state=start)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(state, wanted, atol=1e-12, rtol=0)
    gradients_of = [*inputs, start]
    one = torch.autograd.grad(y.square().sum() + state.sum(), gradients_of)
    two = torch.autograd.grad(expected.square().sum() + wanted.sum(), gradients_of)
    for found, want in zip(one, two, strict=True):
        torch.testing.assert_close(found, want, atol=1e-11, rtol=1e-11)


@every_variant
def test_flops_are_those_of_the_layer_run_token_by_token(kind, changes):
    mixer, x = build(kind, torch.float32, **changes), tokens(1, 1, torch.float32)
    with torch.no_grad():
        _, state = mixer(x)
        with FlopCounterMode(display=False) as counter:
            mixer(x, None, state)
    assert counter.get_total_flops() == mixer.flops_at(1).forward
    assert mixer.flops_per_token(1000) == mixer.flops_at(999)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_decays_and_steps_have_the_published_ranges(kind):
    torch.manual_seed(0)
    options = {"mamba2": {"head_dim": 1}}.get(kind, {"num_heads": 1024, "head_k_dim": 1, "head_v_dim": 1})
    mixer = mixer_class(kind)(mixer_class(kind).Options(**options), Site(1024))
    rate = mixer.A_log.detach().exp()
    low = 0 if kind == "gated_deltanet" else 1
    assert low <= float(rate.min()) < low + 0.3
    assert 15.7 < float(rate.max()) <= 16.001
    assert float(rate.mean()) == pytest.approx((low + 16) / 2, abs=0.5)
    step = torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert 0.00099 < float(step.min()) < 0.0012
    assert 0.08 < float(step.max()) < 0.1001
    assert float(step.log().mean()) == pytest.approx(math.log(0.01), abs=0.15)
    assert {"A_log", "dt_bias"} <= mixer.no_decay()


def test_usual_sizes():
    def heads(kind, size, **options):
        cls = mixer_class(kind)
        return tuple(cls.heads(cls.Options(**options), size))

    assert heads("gated_deltanet", 768) == (9, 9, 64, 128)
    assert heads("gated_deltanet", 2048, num_heads=6) == (6, 6, 256, 512)
    assert heads("gated_deltanet", 2048, head_k_dim=128, num_v_heads=24) == (12, 24, 128, 128)
    assert heads("kimi_delta", 1024) == (8, 8, 128, 128)
    assert heads("mamba2", 768) == (24, 64)
    assert heads("mamba2", 768, num_heads=12) == (12, 128)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gated_deltanet", {"num_heads": 0}, "num_heads is 0; allowed: a whole number of 1 or more"),
        (
            "gated_deltanet",
            {},
            "num_heads is not given, and 3/4 of hidden_size 32 is no multiple of head_k_dim",
        ),
        ("gated_deltanet", {"num_heads": 5}, "head_k_dim is not given"),
        ("gated_deltanet", {"num_heads": 4, "num_v_heads": 6}, "num_v_heads is 6; allowed: multiples of"),
        ("gated_deltanet", {"num_heads": 4, "num_v_heads": 20}, "head_v_dim is not given"),
        ("gated_deltanet", {"use_gate": 1}, "use_gate is 1; allowed: true, false"),
        ("kimi_delta", {"lower_bound": 0.5}, "lower_bound is 0.5; allowed: a number below 0"),
        ("kimi_delta", {"conv_size": True}, "conv_size is True"),
        ("kimi_delta", {"norm_eps": 0}, "norm_eps is 0; allowed: a number above 0"),
        ("mamba2", {"head_dim": 48}, "head_dim is 48; allowed: divisors of expand"),
        ("mamba2", {"num_heads": 3}, "num_heads is 3; allowed: divisors of expand"),
        ("mamba2", {"num_heads": 4, "head_dim": 8}, "num_heads is 4 and head_dim 8"),
        ("mamba2", {"num_heads": 4, "n_groups": 3}, "n_groups is 3; allowed: divisors of the 4 heads"),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, options, message):
    cls = mixer_class(kind)
    with pytest.raises(LayerError, match=message):
        cls(cls.Options(**options), Site(32))
