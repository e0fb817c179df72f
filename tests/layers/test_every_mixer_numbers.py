"""What every mixer must keep, whatever its mathematics: values, gradients and accounts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid.layers import Context, LayerError, Site, mixer_class
from hybrid.layers.softmax import force_plain

from ..parity.twins import stepwise
from ..third_party import KIND
from .mixers import (
    HIDDEN,
    LENGTHS,
    assert_same_gradients,
    assert_same_state,
    build,
    every_kind,
    fresh,
    gradients,
    in_pieces,
    small_options,
    tokens,
)


@every_kind
@pytest.mark.parametrize("length", LENGTHS)
def test_values_and_gradients_are_those_of_the_stepwise_twin(kind, length):
    """fla-org/flash-linear-attention#88. Without rotary, whose tables are fp32, where a kind can do
    without."""
    rotary, tolerance = (2, 1e-6) if kind == "kvm" else (0, 1e-10)
    mixer, x = build(kind, rotary_dim=rotary), tokens(1, length).requires_grad_()
    y, expected = mixer(x)[0], stepwise(mixer, x)
    torch.testing.assert_close(y, expected, atol=tolerance, rtol=0)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected), tolerance)


@every_kind
def test_flops_per_token_is_the_mean_of_decoding(kind):
    """Over whole chunks, where nothing of a chunk's work is left over."""
    mixer = build(kind)
    for length in (8, 16, 64, 120):
        steps = [mixer.flops_at(t) for t in range(length)]
        whole = mixer.flops_per_token(length)
        assert whole.differentiable == pytest.approx(sum(f.differentiable for f in steps) / length)


@every_kind
def test_flops_are_those_counted_in_decoding(kind):
    """Two chunks of single tokens, so that what is done once a chunk is in. OVQ's heads have 8 more features
    for the centroids' logits, which the accounts leave out."""
    mixer, x = build(kind, torch.float32), tokens(1, 56, torch.float32)
    with torch.no_grad(), force_plain():
        _, state = mixer(x[:, :40])
        with FlopCounterMode(display=False) as counter:
            in_pieces(mixer, x[:, 40:], [1] * 16, state)
    found = [mixer.flops_at(t) for t in range(40, 56)]
    expected = sum(flops.forward for flops in found)
    if kind == "ovq":
        linear = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, torch.nn.Linear))
        expected += sum(flops.differentiable - 2 * linear for flops in found)
    assert counter.get_total_flops() == pytest.approx(expected)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_state_bytes_are_those_of_real_states(kind, dtype):
    mixer, x = build(kind, dtype), tokens(1, 100, dtype)
    with torch.no_grad():
        for length in LENGTHS:
            _, state = mixer(x[:, :length])
            assert state.nbytes == mixer.state_bytes(length, dtype.itemsize), f"prompt of {length}"
        state = None
        for t in range(70):
            _, state = mixer(x[:, t : t + 1], None, state)
            assert state.nbytes == mixer.state_bytes(t + 1, dtype.itemsize), f"{t + 1} single tokens"


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_output_has_the_input_dtype_and_is_near_float64(kind, dtype):
    """Lengths beyond every window, so that states are used."""
    exact, x = build(kind), tokens(2, 80)
    low = build(kind, dtype)
    for name, parameter in low.named_parameters():  # both compute with the same numbers
        exact.get_parameter(name).data.copy_(parameter)
    routes: dict = {}
    x = x.to(dtype)
    expected, _ = exact(x.double(), Context.of(x, routes=routes))
    y, state = low(x, Context.of(x, routes=routes))
    assert y.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}[dtype]
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(y.double(), expected, atol=tolerance * scale, rtol=0)
    y, _ = low(x[:, :1], None, state)
    assert y.dtype == dtype


@every_kind
def test_autocast_gives_the_input_dtype_and_near_values(kind):
    mixer, x = build(kind, torch.float32), tokens(2, 60, torch.float32).requires_grad_()
    routes: dict = {}
    y, _ = mixer(x, Context.of(x, routes=routes))
    with torch.autocast("cpu", torch.bfloat16):
        low, state = mixer(x, Context.of(x, routes=routes))
        again, _ = mixer(x[:, :3], None, state)
    assert low.dtype == again.dtype == torch.float32
    torch.testing.assert_close(low, y, atol=0.15 * float(y.detach().abs().max()), rtol=0)
    for name, gradient in gradients(mixer, x, low).items():
        assert torch.isfinite(gradient).all(), name


USUAL = {"chunk": 256, "window": 256, "budget_minimum": 256, "budget_factor": 4.0, "max_centroids": 1024}
BOTH = (torch.float32, torch.bfloat16)
FINITE = [
    *(pytest.param(n, dtype, range(3), {}) for n in (1, 63, 64, 65, 1024) for dtype in BOTH),
    pytest.param(8192, torch.bfloat16, range(1), USUAL),
    *(pytest.param(8192, dtype, range(3), USUAL, marks=pytest.mark.slow) for dtype in BOTH),
]


@every_kind
@pytest.mark.parametrize(("length", "dtype", "seeds", "options"), FINITE, ids=str)
def test_fresh_layers_are_finite_forward_and_backward_and_after_a_step(kind, length, dtype, seeds, options):
    """fla-org/flash-linear-attention#150. Two steps, as many layers give nothing before the first."""
    for seed in seeds:
        mixer, x = fresh(kind, dtype, seed, **options), tokens(1, length, dtype, seed).requires_grad_()
        optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2)
        for _ in range(2):
            y, _ = mixer(x, Context.of(x, want_state=False))
            (y.float() - 1).square().sum().backward()
            for name, parameter in mixer.named_parameters():
                assert torch.isfinite(parameter.grad).all(), name  # every parameter always has one
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(y).all()
        assert torch.isfinite(x.grad).all()
        assert all(torch.isfinite(p).all() for p in mixer.parameters())


@every_kind
@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_the_loss_goes_down_in_20_steps_at_256_tokens(kind, dtype):
    """From the start: every token is to say around which vector its sequence was drawn."""
    mixer, target = fresh(kind, dtype), tokens(2, 1, dtype, 2)
    x = tokens(2, 256, dtype) + target
    optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        y, _ = mixer(x, Context.of(x, want_state=False))
        loss = (y.float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@every_kind
def test_statistics_are_finite_scalars_named_after_the_layer_and_change_nothing(kind):
    mixer = build(kind, torch.float32, site=Site(HIDDEN, layer=3, num_layers=5))
    x, found = tokens(2, 60, torch.float32), {}
    y, _ = mixer(x, Context.of(x, statistics=found))
    assert torch.equal(y, mixer(x)[0])
    assert all(name.startswith("3/") for name in found)
    for value in found.values():
        assert value.shape == ()
        assert torch.isfinite(value)
        assert not value.requires_grad
    assert found or kind in ("full", "sliding_window", "block_window", KIND)


@every_kind
def test_repeated_runs_are_identical(kind):
    """Dao-AILab/flash-attention#414."""

    def run():
        mixer = build(kind, torch.float32)
        optimizer = torch.optim.SGD(mixer.parameters(), lr=0.1)
        for step in range(5):
            x = tokens(2, 60, torch.float32, step)
            mixer(x, Context.of(x, want_state=False))[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in mixer.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@every_kind
def test_nothing_is_read_from_memory_that_was_not_written(kind, monkeypatch):
    mixer, x = build(kind, torch.float32), tokens(2, 60, torch.float32).requires_grad_()
    y, state = mixer(x)
    expected = gradients(mixer, x, y)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        again, state_again = mixer(x)
        found = gradients(mixer, x, again)
        with torch.no_grad():
            decoded, _ = in_pieces(mixer, x, [20, *[1] * 40])
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(again, y, atol=1e-5, rtol=0)
    torch.testing.assert_close(decoded, y, atol=1e-4, rtol=0)
    assert_same_state(state_again, state, 1e-4)
    assert_same_gradients(found, expected, 1e-5)


@every_kind
def test_meta_construction_then_reset_equals_direct_reset(kind):
    direct = mixer_class(kind)(small_options(kind), Site(HIDDEN, layer=2, num_layers=5))
    torch.manual_seed(3)
    direct.reset_parameters()
    with torch.device("meta"):
        mixer = mixer_class(kind)(small_options(kind), Site(HIDDEN, layer=2, num_layers=5))
    assert all(p.is_meta for p in mixer.parameters())
    with pytest.raises(LayerError, match="to_empty"):
        mixer(tokens(1, 3, torch.float32))
    mixer.to_empty(device="cpu")
    for parameter in mixer.parameters():
        parameter.data.fill_(float("nan"))
    torch.manual_seed(3)
    mixer.reset_parameters()
    for name, parameter in direct.named_parameters():
        assert torch.equal(parameter, mixer.get_parameter(name)), name
    assert direct.state_dict().keys() == mixer.state_dict().keys()


@every_kind
def test_no_decay_names_all_but_matrices(kind):
    mixer = build(kind)
    known = dict(mixer.named_parameters())
    assert mixer.no_decay() <= known.keys()
    assert {n for n, p in known.items() if p.ndim < 2} <= mixer.no_decay()


@every_kind
def test_accounts_work_without_weights(kind):
    with torch.device("meta"):
        mixer = mixer_class(kind)(small_options(kind), Site(HIDDEN))
    assert mixer.flops_per_token(100_000).training > mixer.flops_per_token(100_000).forward > 0
    assert mixer.state_bytes(100_000, 2) > 0
