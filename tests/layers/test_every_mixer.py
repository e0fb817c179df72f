"""What every mixer must keep, whatever its mathematics; a new kind is covered by being registered."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.layers.base import Context, LayerError, Site
from hybrid.layers.registry import mixer_class

from .mixers import (
    HIDDEN,
    KINDS,
    assert_same_gradients,
    assert_same_state,
    build,
    gradients,
    in_pieces,
    packed_context,
    small_options,
    tokens,
)

LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 65, 100)  # T027
every_kind = pytest.mark.parametrize("kind", KINDS)


def cuts_of(total: int):
    """Ways to cut `total` tokens into calls."""
    borders = st.sets(st.integers(1, total - 1), max_size=8) if total > 1 else st.just(set())
    return borders.map(
        lambda b: [end - start for start, end in zip([0, *sorted(b)], [*sorted(b), total], strict=True)]
    )


@every_kind
@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_split_into_calls_equals_one_call(kind, data):
    """T037, and T027's lengths: values, final state and gradients."""
    length = data.draw(st.sampled_from(LENGTHS))
    cuts = data.draw(cuts_of(length))
    mixer, x = build(kind), tokens(2, length).requires_grad_()
    y, state = mixer(x)
    y_split, state_split = in_pieces(mixer, x, cuts)
    torch.testing.assert_close(y_split, y, atol=1e-10, rtol=0)
    assert_same_state(state_split, state, 1e-10)
    assert_same_gradients(gradients(mixer, x, y_split), gradients(mixer, x, y), 1e-10)


@every_kind
@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_calls_that_take_the_state_over_equal_one_call(kind, data):
    """Without gradients, where decoding writes in place; T035 for windows."""
    length = data.draw(st.sampled_from(LENGTHS))
    cuts = data.draw(st.one_of(cuts_of(length), st.just([1] * length)))
    mixer, x = build(kind), tokens(2, length)
    with torch.no_grad():
        y, state = mixer(x)
        y_split, state_split = in_pieces(mixer, x, cuts)
    torch.testing.assert_close(y_split, y, atol=1e-10, rtol=0)
    assert_same_state(state_split, state, 1e-10)


@every_kind
@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_then_single_tokens(kind, length):
    mixer, x = build(kind), tokens(1, length + 20)
    with torch.no_grad():
        y, _ = mixer(x)
        found, state = in_pieces(mixer, x, [length, *[1] * 20])
    torch.testing.assert_close(found, y, atol=1e-10, rtol=0)
    assert state.position == length + 20


@every_kind
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_packed_documents_equal_each_alone(kind, lengths):
    mixer, x = build(kind), tokens(1, sum(lengths)).requires_grad_()
    alone = [mixer(piece) for piece in x.split(lengths, 1)]
    y = torch.cat([one for one, _ in alone], 1)
    expected = gradients(mixer, x, y)
    bare, none = mixer(x, packed_context(x, lengths, want_state=False))
    kept, states = mixer(x, packed_context(x, lengths))
    assert none is None
    for found in (bare, kept):
        torch.testing.assert_close(found, y, atol=1e-10, rtol=0)
        assert_same_gradients(gradients(mixer, x, found), expected, 1e-10)
    for state, (_, own) in zip(states, alone, strict=True):
        assert_same_state(state, own, 1e-10)


@every_kind
def test_packed_documents_continue_from_their_states(kind):
    mixer, x = build(kind), tokens(1, 70)
    first, second = [20, 3, 9], [5, 30, 3]
    documents = x.split([25, 33, 12], 1)
    with torch.no_grad():
        row = torch.cat([d[:, :n] for d, n in zip(documents, first, strict=True)], 1)
        _, states = mixer(row, packed_context(row, first))
        row = torch.cat([d[:, n:] for d, n in zip(documents, first, strict=True)], 1)
        y, states = mixer(row, packed_context(row, second), states)
        for found, state, document in zip(y.split(second, 1), states, documents, strict=True):
            whole, own = mixer(document)
            torch.testing.assert_close(found, whole[:, -found.shape[1] :], atol=1e-10, rtol=0)
            assert_same_state(state, own, 1e-10)


@every_kind
def test_documents_at_any_positions_go_on_together_as_each_alone(kind):
    """Equal lengths too, where position-free mixers make one batch of several documents."""
    mixer, x = build(kind), tokens(4, 40)
    places, states, found = [0] * 4, [None] * 4, [[] for _ in range(4)]
    with torch.no_grad():
        expected, _ = mixer(x)
        for lengths in ([9, 4, 1, 4], *[[1] * 4] * 12, [7, 3, 3, 7], [2] * 4):
            pieces = [
                x[i : i + 1, at : at + n] for i, (at, n) in enumerate(zip(places, lengths, strict=True))
            ]
            row = torch.cat(pieces, 1)
            y, states = mixer(row, packed_context(row, lengths), states)
            for i, piece in enumerate(y.split(lengths, 1)):
                found[i].append(piece)
                places[i] += lengths[i]
                assert states[i].position == places[i]
        for i, pieces in enumerate(found):
            torch.testing.assert_close(
                torch.cat(pieces, 1), expected[i : i + 1, : places[i]], atol=1e-10, rtol=0
            )
            assert_same_state(states[i], mixer(x[i : i + 1, : places[i]])[1], 1e-10)


@every_kind
def test_a_sequence_does_not_depend_on_its_neighbours_in_the_batch(kind):
    mixer, x = build(kind), tokens(3, 50)
    y, _ = mixer(x)
    for b in range(3):
        torch.testing.assert_close(mixer(x[b : b + 1])[0], y[b : b + 1], atol=1e-10, rtol=0)


@every_kind
def test_later_tokens_do_not_change_earlier_outputs(kind):
    mixer, x = build(kind), tokens(1, 60)
    y, _ = mixer(x)
    for border in (1, 7, 8, 16, 17, 31, 59):
        changed = x.clone()
        changed[:, border:] += 1
        torch.testing.assert_close(mixer(changed)[0][:, :border], y[:, :border], atol=1e-10, rtol=0)


@every_kind
def test_empty_documents_and_calls_are_refused(kind):
    """T023."""
    mixer, x = build(kind), tokens(1, 48)
    for borders in ([0, 16, 16, 48], [0, 0, 48], [0, 48, 48]):
        with pytest.raises(ValueError, match="of the packed row has 0 tokens"):
            mixer(x, Context.of(x, torch.tensor(borders, dtype=torch.int32)))
    with pytest.raises(LayerError, match="at least one sequence and one token"):
        mixer(x[:, :0])
    with pytest.raises(LayerError, match="from 0 to the row's 48 tokens"):
        mixer(x, Context.of(x, torch.tensor([0, 47], dtype=torch.int32)))
    with pytest.raises(LayerError, match="one packed row"):
        mixer(x, Context.of(tokens(2, 48), torch.tensor([0, 48], dtype=torch.int32)))


@every_kind
def test_a_state_of_another_batch_is_refused_before_it_is_spent(kind):
    mixer, x = build(kind), tokens(2, 20)
    with torch.no_grad():
        _, state = mixer(x)
        with pytest.raises(LayerError, match="the state holds 2 sequences, the call has 1"):
            mixer(x[:1], None, state)
        mixer(x, None, state)
    with pytest.raises(LayerError, match=r"documents of \(10, 10\) tokens in a row of 21"):
        mixer(tokens(1, 21), packed_context(x[:1], [10, 10]))


@every_kind
def test_a_spent_state_is_refused_and_a_fork_is_not(kind):
    mixer, x = build(kind), tokens(2, 40)
    with torch.no_grad():
        _, state = mixer(x[:, :20])
        fork = state.fork()
        one, after = in_pieces(mixer, x[:, 20:], [1] * 20, state)
        with pytest.raises(LayerError, match="fork"):
            mixer(x[:, 20:], None, state)
        with pytest.raises(LayerError, match="fork"):
            state.fork()
        two, after_two = in_pieces(mixer, x[:, 20:], [1] * 20, fork)
    assert torch.equal(one, two)
    assert_same_state(after, after_two, 0)


@every_kind
def test_two_continuations_of_one_fork_do_not_touch_each_other(kind):
    mixer, x = build(kind), tokens(2, 60)
    other = x[:, 30:] + 1
    with torch.no_grad():
        _, state = in_pieces(mixer, x[:, :30], [20, *[1] * 10])
        fork = state.fork()
        ours, theirs = [], []
        for t in range(30):
            y, state = mixer(x[:, 30 + t : 31 + t], None, state)
            z, fork = mixer(other[:, t : t + 1], None, fork)
            ours.append(y)
            theirs.append(z)
        for found, tail in ((ours, x[:, 30:]), (theirs, other)):
            expected, _ = mixer(torch.cat((x[:, :30], tail), 1))
            torch.testing.assert_close(torch.cat(found, 1), expected[:, 30:], atol=1e-10, rtol=0)


@every_kind
def test_with_gradients_a_state_is_a_value(kind):
    mixer, x = build(kind), tokens(1, 40)
    _, state = mixer(x[:, :20])
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    one, _ = mixer(x[:, 20:], None, state)
    two, _ = mixer(x[:, 20:], None, state)
    assert torch.equal(one, two)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.tensors().items())


@every_kind
def test_detached_state_stops_the_gradient(kind):
    mixer = build(kind)
    x = tokens(1, 40).requires_grad_()
    _, state = mixer(x[:, :20])
    y, _ = mixer(x[:, 20:], None, state.detach())
    (found,) = torch.autograd.grad(y.sum(), x)
    assert float(found[:, :20].abs().max()) == 0
    assert float(found[:, 20:].abs().max()) > 0


@every_kind
def test_the_empty_state_is_the_start(kind):
    mixer, x = build(kind), tokens(2, 30)
    y, state = mixer(x, None, mixer.empty_state(2))
    expected, own = mixer(x)
    assert torch.equal(y, expected)
    assert_same_state(state, own, 0)
    assert mixer.empty_state(2).position == 0
    assert mixer.empty_state(1).nbytes == mixer.state_bytes(0, 8)


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
def test_flops_per_token_is_the_mean_of_decoding(kind):
    """Over whole chunks, where nothing of a chunk's work is left over."""
    mixer = build(kind)
    for length in (8, 16, 64, 120):
        steps = [mixer.flops_at(t) for t in range(length)]
        whole = mixer.flops_per_token(length)
        assert whole.differentiable == pytest.approx(sum(f.differentiable for f in steps) / length)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_output_has_the_input_dtype_and_is_near_float64(kind, dtype):
    """T039: lengths beyond every window, so that states are used."""
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


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1024])
def test_fresh_layers_are_finite_forward_and_backward_and_after_a_step(kind, dtype, length):
    """T025."""
    for seed in range(3):
        torch.manual_seed(seed)
        mixer = mixer_class(kind)(small_options(kind), Site(HIDDEN)).to(dtype)
        x = tokens(1, length, dtype, seed)
        optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2)
        for _ in range(2):
            y, _ = mixer(x, Context.of(x, want_state=False))
            (y.float() - 1).square().sum().backward()
            for name, parameter in mixer.named_parameters():
                assert torch.isfinite(parameter.grad).all(), name  # every parameter always has one
            optimizer.step()
            optimizer.zero_grad()
        assert torch.isfinite(y).all()
        assert all(torch.isfinite(p).all() for p in mixer.parameters())


@every_kind
def test_long_sequences_are_finite(kind):
    """T025 at 8192 tokens, with chunks and windows of a usual size."""
    options = small_options(kind, chunk=256, window=256, budget_minimum=256, budget_factor=4.0)
    torch.manual_seed(0)
    mixer = mixer_class(kind)(options, Site(HIDDEN)).bfloat16()
    torch.nn.init.normal_(mixer.get_parameter("c_proj.weight")) if hasattr(mixer, "c_proj") else None
    x = tokens(1, 8192, torch.bfloat16).requires_grad_()
    y, _ = mixer(x, Context.of(x, want_state=False))
    y.float().square().mean().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in mixer.parameters())


@every_kind
def test_repeated_runs_are_identical(kind):
    """T031."""

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


@every_kind
def test_inputs_of_another_shape_or_dtype_are_refused(kind):
    """In words, before the state is spent: a layer used in another trainer meets them first."""
    mixer, x = build(kind, torch.float32), tokens(2, 9, torch.float32)
    with torch.no_grad():
        _, state = mixer(x)
        for wrong in (x[0], x[..., None], x[..., : HIDDEN - 1]):
            with pytest.raises(
                LayerError, match=rf"x must be \[batch, tokens, {HIDDEN}\], got torch.float32"
            ):
                mixer(wrong, None, state)
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            with pytest.raises(LayerError, match=rf"x is {dtype}; the layer's parameters are torch.float32"):
                mixer(x.to(dtype), None, state)
        with pytest.raises(LayerError, match=r"state must be a \w+State, got a int"):
            mixer(x, None, 3)
        with pytest.raises(LayerError, match="takes a list of states, one per document"):
            mixer(x[:1], packed_context(x[:1], [4, 5]), state)
        mixer(x, None, state)


@pytest.mark.parametrize("borders", [[0, 9], torch.tensor([0.0, 9.0]), torch.tensor([[0, 9]])], ids=str)
def test_borders_that_are_no_row_of_whole_numbers_are_refused(borders):
    with pytest.raises(LayerError, match="cu_seqlens must be one row of int32 in a tensor, got"):
        Context.of(tokens(1, 9), borders)
