"""What a model remembers between calls: splitting, forking, saving, refusing."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hybrid.layers import LayerError
from hybrid.model import ModelError
from hybrid.model.state import HybridState, StateError, write_file

from ..mini import EQUAL, borders, difference, ids, mini


def positions(state):
    return {state.position, *(layer.position for layer in state.layers)} | {
        layer.mixer.position for layer in state.layers
    }


def in_pieces(model, text, cuts):
    """Logits of `text` read in calls that end at `cuts`, and the last state."""
    logits, state, start = [], None, 0
    for end in [*cuts, text.shape[1]]:
        part, state = model(text[:, start:end], state)
        assert positions(state) == {end}
        logits.append(part)
        start = end
    return torch.cat(logits, 1), state


@pytest.mark.parametrize("pattern", ["WKRF", "KRWF", "B"])
@pytest.mark.parametrize("prompt", [1, 30, 31, 32, 33, 64, 100])
def test_steps_across_the_window_equal_recomputation(pattern, prompt):
    """huggingface/transformers#37574, #38156: window 32, and the pattern may start with the sliding layer."""
    model, text = mini(pattern), ids(prompt + 40)
    with torch.no_grad():
        whole, _ = model(text)
        logits, _ = in_pieces(model, text, list(range(prompt, prompt + 40)))
    assert difference(logits, whole) <= EQUAL


@pytest.mark.parametrize("cuts", [[300], [300, *range(305, 312)], [128, 256], [200, 220]])
def test_several_tokens_at_once_continue_a_state(cuts):
    """300 and then 5 at once and single steps; 128 + 128 + 44; a second turn on the same state."""
    model, text = mini("KRWFB"), ids(312)
    with torch.no_grad():
        whole, end = model(text)
        logits, state = in_pieces(model, text, cuts)
    assert difference(logits, whole) <= EQUAL
    for name, tensor in end.tensors().items():
        assert difference(state.tensors()[name], tensor) <= EQUAL, name


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 119), max_size=12), grad=st.booleans(), batch=st.integers(1, 2))
@example(cuts=set(range(1, 120)), grad=False, batch=2)
@example(cuts={15, 16, 17, 31, 32, 33, 48, 64}, grad=True, batch=1)
def test_any_split_gives_the_result_of_one_call(cuts, grad, batch):
    model, text = mini("KRWFB", feed_forward="gelu"), ids(120, batch)
    with torch.set_grad_enabled(grad):
        whole, _ = model(text)
        logits, _ = in_pieces(model, text, sorted(cuts))
    assert difference(logits, whole) <= EQUAL


def test_text_with_exact_ties_splits_equally_with_the_same_routes():
    """Repeated text gives equal keys, so that rounding decides which slot; replayed routes take that away."""
    model, routes = mini(), {}
    text = ids(12).repeat(1, 15)
    with torch.no_grad():
        whole, _ = model(text, routes=routes)
        parts, state, start = [], None, 0
        for end in (1, 40, 41, 100, 180):
            part, state = model(text[:, start:end], state, routes=dict(routes))
            parts.append(part)
            start = end
    assert difference(torch.cat(parts, 1), whole) <= EQUAL


def test_gradients_flow_through_a_state():
    model, text = mini("KRWFB"), ids(90)

    def gradients(logits):
        return torch.autograd.grad(logits.square().mean(), list(model.parameters()))

    whole = gradients(model(text)[0])
    split = gradients(in_pieces(model, text, [20, 33, 70])[0])
    for (name, _), one, other in zip(model.named_parameters(), split, whole, strict=True):
        assert difference(one, other) <= 1e-4 * other.abs().max() + 1e-9, name


def test_a_packed_row_continues_a_list_of_states():
    model = mini("KRWFB")
    first, second = (40, 3, 17), (1, 30, 50)
    texts = [ids(a + b, seed=a) for a, b in zip(first, second, strict=True)]
    heads = [text[:, :a] for text, a in zip(texts, first, strict=True)]
    tails = [text[:, a:] for text, a in zip(texts, first, strict=True)]
    with torch.no_grad():
        whole = [model(text) for text in texts]
        a, states = model(torch.cat(heads, 1), cu_seqlens=borders(*first))
        b, states = model(torch.cat(tails, 1), states, cu_seqlens=borders(*second))
    for i, (logits, end) in enumerate(whole):
        ours = torch.cat([a.split(first, 1)[i], b.split(second, 1)[i]], 1)
        assert difference(ours, logits) <= EQUAL
        assert positions(states[i]) == {texts[i].shape[1]}
        assert states[i].layout == end.layout


def test_a_packed_row_may_start_some_documents_and_continue_others():
    model, text = mini("KWF"), ids(50)
    with torch.no_grad():
        _, state = model(text[:, :20])
        row = torch.cat([text[:, 20:], text[:, :9]], 1)
        logits, states = model(row, [state, None], cu_seqlens=borders(30, 9))
        assert difference(logits[:, :30], model(text)[0][:, 20:]) <= EQUAL
        assert difference(logits[:, 30:], model(text[:, :9])[0]) <= EQUAL
    assert [one.position for one in states] == [50, 9]


# A state is a value


def test_a_state_that_was_handed_on_is_refused():
    model, text = mini(), ids(20)
    with torch.no_grad():
        _, state = model(text)
        kept = state.fork()
        one, _ = model(text[:, :3], state)
        with pytest.raises(LayerError, match="handed on"):
            model(text[:, :3], state)
        other, _ = model(text[:, :3], kept)
    assert torch.equal(one, other)


def test_with_gradients_a_state_is_left_alone():
    model, text = mini(), ids(40)
    _, state = model(text)
    one, _ = model(text[:, :3], state)
    other, _ = model(text[:, :3], state)
    assert torch.equal(one, other)
    assert one.requires_grad
    cut, _ = model(text[:, :3], state.detach())
    assert torch.equal(one, cut)


def test_bytes_count_every_tensor():
    _, state = mini()(ids(40))
    assert state.nbytes == sum(t.numel() * t.element_size() for t in state.tensors().values())


def test_a_forked_state_shares_no_memory():
    with torch.no_grad():
        _, state = mini()(ids(40))
    fork = state.fork()
    for name, tensor in state.tensors().items():
        assert fork.tensors()[name].data_ptr() != tensor.data_ptr() or tensor.numel() == 0


# Rows


def test_selected_rows_go_on_like_their_sources():
    model, text = mini("KRWFB"), ids(60, batch=3)
    with torch.no_grad():
        _, state = model(text[:, :50])
        picked = state.select([2, 0, 2])
        assert (picked.batch, picked.position) == (3, 50)
        found, _ = model(text[[2, 0, 2], 50:], picked)
        expected, _ = model(text[:, 50:], state)  # still good
    assert difference(found, expected[[2, 0, 2]]) <= EQUAL
    with pytest.raises(StateError, match="row 3 is wanted of a state of 3 sequences"):
        model(text)[1].select([0, 3])


@pytest.mark.parametrize("pattern", ["KRWFB", "QGDM"])
def test_concatenated_states_go_on_like_each(pattern):
    model, text = mini(pattern), ids(60, batch=3)
    with torch.no_grad():
        whole, _ = model(text)
        states = [model(text[:1, :50])[1], model(text[1:, :50])[1]]
        joined = HybridState.concatenate(states)
        assert (joined.batch, joined.position) == (3, 50)
        found, _ = model(text[:, 50:], joined)
    assert difference(found, whole[:, 50:]) <= EQUAL


def test_states_that_cannot_share_a_batch_are_refused():
    with torch.no_grad():
        states = [mini()(ids(n))[1] for n in (20, 21)]
        with pytest.raises(StateError, match=r"at positions 20 and 21; .* packed row the list"):
            HybridState.concatenate(states)
        with pytest.raises(StateError, match="different models: it has 2 layers, the other 4"):
            HybridState.concatenate([states[0], mini("KR")(ids(20))[1]])
        double = mini().double()(ids(20))[1]
        with pytest.raises(StateError, match=r"differ in layers\.0\.last, .*float64.*float32"):
            HybridState.concatenate([states[0], double])
        with pytest.raises(StateError, match="no state is given"):
            HybridState.concatenate([])
        with pytest.raises(StateError, match="one state is given for two documents"):
            mini()(ids(2), [states[0], states[0]], cu_seqlens=borders(1, 1))


# Files


@pytest.mark.parametrize("length", [1, 20, 70])
def test_a_saved_state_continues_exactly(tmp_path, length):
    model, text = mini("KRWFB"), ids(80, batch=2)
    with torch.no_grad():
        _, state = model(text[:, :length])
        state.save(tmp_path / "state.safetensors")
        expected, _ = model(text[:, length:], state)
        loaded = HybridState.load(tmp_path / "state.safetensors")
        assert positions(loaded) == {length}
        assert torch.equal(model(text[:, length:], loaded)[0], expected)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_a_state_of_a_decoding_run_is_saved_whole(tmp_path):
    model, text = mini("KRWFB"), ids(60)
    with torch.no_grad():
        _, state = in_pieces(model, text[:, :50], list(range(20, 50)))
        state.save(tmp_path / "s")
        expected, _ = model(text[:, 50:], state)
        assert difference(model(text[:, 50:], HybridState.load(tmp_path / "s"))[0], expected) <= 1e-6


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    with torch.no_grad():
        _, state = mini("F")(ids(5))
    path = tmp_path / "s"
    state.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        state.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_hold_no_state_are_refused(tmp_path):
    with pytest.raises(StateError, match="no such file"):
        HybridState.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StateError, match="cannot be read as a state"):
        HybridState.load(tmp_path / "text")
    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(StateError, match="not a model state"):
        HybridState.load(tmp_path / "other")
    with torch.no_grad():
        _, state = mini("F")(ids(5))
    state.save(tmp_path / "s")
    (tmp_path / "cut").write_bytes((tmp_path / "s").read_bytes()[:-10])
    with pytest.raises(StateError, match="cannot be read as a state"):
        HybridState.load(tmp_path / "cut")


def test_a_changed_byte_is_found(tmp_path):
    with torch.no_grad():
        mini("F")(ids(5))[1].save(tmp_path / "s")
    content = bytearray((tmp_path / "s").read_bytes())
    content[-5] ^= 1
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(StateError, match=r"damaged .*checksum"):
        HybridState.load(tmp_path / "s")


def test_a_state_of_a_layer_that_is_not_installed_is_refused(tmp_path):
    strange = json.dumps([{"class": "StrangeState", "fields": {}}])
    texts = {"position": "3", "layout": "[]", "layers": strange}
    write_file(tmp_path / "s", texts, {"layers.0.x": torch.zeros(1)})
    with pytest.raises(StateError, match="'StrangeState', of which no layer is installed"):
        HybridState.load(tmp_path / "s")
    for wrong in ("[{", '["x"]', "3", '[{"class": "hybrid.BlockState", "fields": {"none": 1}}]'):
        write_file(tmp_path / "s", texts | {"layers": wrong}, {"layers.0.x": torch.zeros(1)})
        with pytest.raises(StateError, match="the state is damaged"):
            HybridState.load(tmp_path / "s")


# Refusals come before anything is changed


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"pattern": "KW"}, "it has 2 layers, this model 4"),
        ({"pattern": "KFWF"}, "its layer 1 is full .* this model's is rwkv7"),
        ({"hidden_size": 128}, "its backbone is 128 wide .* this model's is 64 wide"),
        ({"layers": {"W": {"kind": "sliding_window", "window": 16}}}, '"window": 16'),
    ],
)
def test_a_state_of_another_model_is_refused(other, words):
    with torch.no_grad():
        _, state = mini(**other)(ids(20))
        with pytest.raises(StateError, match=words):
            mini()(ids(5), state)


def test_refused_calls_leave_the_state_usable():
    model, text = mini(), ids(30, batch=2)
    with torch.no_grad():
        whole, _ = model(text)
        _, state = model(text[:, :20])
        with pytest.raises(StateError, match="holds 2 sequences, the call has 1"):
            model(text[:1, 20:], state)
        with pytest.raises(ModelError, match="vocabulary"):
            model(text[:, 20:] + 400, state)
        with pytest.raises(ModelError, match="must be a HybridState, got list"):
            model(text[:, 20:], [state, state])
        with pytest.raises(ModelError, match="2 documents needs as many states, got a HybridState"):
            model(text[:1, 20:], state, cu_seqlens=borders(5, 5))
        with pytest.raises(StateError, match="holds 2 sequences, the call has 1"):
            model(text[:1, 20:], [state, None], cu_seqlens=borders(5, 5))
        logits, _ = model(text[:, 20:], state)
    assert difference(logits, whole[:, 20:]) <= EQUAL
