"""What every mixer must keep, whatever its mathematics: calls, states, packed rows, refusals.

A new kind is covered by being registered, another package's too: the README's example is installed as such.
Values and accounts are in `test_every_mixer_numbers.py`, compiled blocks in `test_every_mixer_compiled.py`.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.layers import Context, LayerError
from hybrid.model.state import BlockState, HybridState

from ..third_party import KIND
from .mixers import (
    HIDDEN,
    KINDS,
    LENGTHS,
    assert_same_gradients,
    assert_same_state,
    build,
    every_kind,
    gradients,
    in_pieces,
    packed_context,
    tokens,
)


def test_a_mixer_of_another_package_is_among_the_kinds():
    assert KIND in KINDS


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
    """Values, final state and gradients, at the lengths of fla-org/flash-linear-attention#88."""
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
    """Without gradients, where decoding writes in place; huggingface/transformers#37574 for windows."""
    length = data.draw(st.sampled_from(LENGTHS))
    cuts = data.draw(st.one_of(cuts_of(length), st.just([1] * length)))
    mixer, x = build(kind), tokens(2, length)
    with torch.no_grad():
        y, state = mixer(x)
        y_split, state_split = in_pieces(mixer, x, cuts)
    torch.testing.assert_close(y_split, y, atol=1e-10, rtol=0)
    assert_same_state(state_split, state, 1e-10)


@every_kind
def test_every_length_up_to_100_and_going_on_from_it(kind):
    """fla-org/flash-linear-attention#88."""
    mixer, x = build(kind), tokens(1, 101)
    with torch.no_grad():
        y, _ = mixer(x)
        for length in range(1, 101):
            found, _ = in_pieces(mixer, x, [length, 101 - length])
            torch.testing.assert_close(found, y, atol=1e-10, rtol=0, msg=lambda m, n=length: f"{n}: {m}")


@every_kind
@pytest.mark.parametrize("cuts", [[128, 128], [200, 56]], ids=str)
def test_256_tokens_in_two_calls_in_fp32(kind, cuts):
    """fla-org/flash-linear-attention#494."""
    mixer, x, routes = build(kind, torch.float32), tokens(2, 256, torch.float32), {}
    y, state = mixer(x, Context.of(x, routes=routes))
    y_split, state_split = in_pieces(mixer, x, cuts, routes=routes)
    torch.testing.assert_close(y_split, y, atol=1e-4, rtol=0)
    assert_same_state(state_split, state, 1e-4)


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
    """huggingface/transformers#46773. Equal lengths too, where position-free mixers make one batch of several
    documents."""
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
    """fla-org/flash-linear-attention#103."""
    mixer, x = build(kind), tokens(1, 48)
    for borders in ([0, 16, 16, 48], [0, 0, 48], [0, 48, 48]):
        with pytest.raises(ValueError, match="of the packed row has 0 tokens"):
            mixer(x, Context.of(x, torch.tensor(borders, dtype=torch.int32)))
    with pytest.raises(ValueError, match="document 0 of the packed row has 0 tokens"):
        mixer(x[:, :2], Context.of(x[:, :2], torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32)))
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
def test_a_state_of_a_layer_with_other_options_is_refused(kind):
    """Of the same shapes or not: a window of another length would only give other numbers."""
    mixer, x = build(kind), tokens(1, 20)
    changes = {"chunk": 4, "window": 5, "num_heads": 2, "scale": 3.0}
    names = {field.name for field in dataclasses.fields(mixer.options)} & changes.keys()
    assert names
    for name in names:
        _, state = build(kind, **{name: changes[name]})(x)
        was, here = changes[name], getattr(mixer.options, name)
        with pytest.raises(LayerError, match=f"another layer's: {name} {was}, here {here}$"):
            mixer(x, state=state)


@every_kind
def test_autocast_may_begin_and_end_between_two_calls(kind):
    mixer, x = build(kind, torch.float32), tokens(1, 37, torch.float32)
    whole, _ = mixer(x)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            first, state = mixer(x[:, :20])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                middle, state = mixer(x[:, 20:30].bfloat16(), state=state)
            last, _ = mixer(x[:, 30:], state=state)
        found = torch.cat((first, middle.float(), last), 1)
        assert (found - whole).abs().max() <= 0.03 * whole.abs().max()


@every_kind
def test_a_state_of_inference_mode_can_be_differentiated_from(kind):
    mixer, x = build(kind), tokens(1, 37)
    whole, _ = mixer(x)
    with torch.inference_mode():
        _, state = mixer(x[:, :20])
    y, _ = mixer(x[:, 20:].clone().requires_grad_(), state=state)
    y.sum().backward()
    torch.testing.assert_close(y, whole[:, 20:])


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
@pytest.mark.parametrize("length", [1, 21, 40])
def test_a_state_saved_to_a_file_continues_exactly(kind, length, tmp_path):
    mixer, x = build(kind, torch.float32), tokens(2, 80, torch.float32)
    with torch.no_grad():
        _, state = in_pieces(mixer, x[:, :length], [1] * length)
        layout = ("backbone", kind)
        HybridState([BlockState(length, state, None)], length, layout).save(tmp_path / "state")
        loaded = HybridState.load(tmp_path / "state").layers[0].mixer
        assert type(loaded) is type(state)
        assert_same_state(loaded, state, 0)
        cuts = [7, 1, 1, 80 - length - 9]
        expected, after = in_pieces(mixer, x[:, length:], cuts, state)
        found, after_load = in_pieces(mixer, x[:, length:], cuts, loaded)
    assert torch.equal(found, expected)
    assert_same_state(after_load, after, 0)


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
