"""Full, sliding-window and block-window attention against their stepwise twins."""

import pytest
import torch

from hybrid.layers import Context, LayerError, Site
from hybrid.layers.attention import BlockOptions, SlidingOptions
from hybrid.layers.softmax import force_plain

from ..parity.attention_reference import mix, visible_keys
from .mixers import HIDDEN, assert_same_gradients, build, gradients, in_pieces, tokens

KINDS = ("full", "sliding_window", "block_window")
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 63, 65, 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_gradients_match_the_stepwise_twin(kind, length):
    """Also of partial chunks (fla-org/flash-linear-attention#88)."""
    mixer, x = build(kind, torch.float32), tokens(2, length, torch.float32).requires_grad_()
    y, expected = mixer(x)[0], mix(mixer, x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=0)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected), 1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sliding_window", {"window": 1}),
        ("sliding_window", {"window": 2}),
        ("sliding_window", {"window": 100}),
        ("block_window", {"chunk": 1, "window_chunks": 1, "sinks": 0}),
        ("block_window", {"chunk": 5, "window_chunks": 1, "sinks": 5}),
        ("block_window", {"chunk": 4, "window_chunks": 3, "sinks": 0}),
        ("block_window", {"chunk": 64, "window_chunks": 2, "sinks": 1}),
        ("full", {"num_kv_heads": 1}),
        ("full", {"num_kv_heads": 4, "rotary_dim": 0}),
        ("full", {"num_heads": 3, "num_kv_heads": 3, "head_dim": 6, "rotary_dim": 6}),
    ],
)
def test_other_sizes_match_in_one_call_and_in_single_tokens(kind, changes):
    mixer, x = build(kind, **changes), tokens(1, 37)
    expected = mix(mixer, x)
    torch.testing.assert_close(mixer(x)[0], expected, atol=1e-6, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(in_pieces(mixer, x, [1] * 37)[0], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(in_pieces(mixer, x, [13, 1, 14, 9])[0], expected, atol=1e-6, rtol=0)


def paths(mixer, x):
    """The same queries by every path: one call, cached prefill in two calls, single tokens, plain kernels."""
    with torch.no_grad():
        found = [mixer(x, Context.of(x, want_state=False))[0]]
        found += [in_pieces(mixer, x, cuts)[0] for cuts in ([6, x.shape[1] - 6], [1] * x.shape[1])]
        with force_plain():
            return [*found, mixer(x)[0]]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("sliding_window", {"window": 4}),
        ("block_window", {"chunk": 4, "window_chunks": 2, "sinks": 1}),
        ("full", {}),
    ],
)
def test_exactly_the_documented_keys_are_visible_on_every_path(kind, changes):
    """Changing token j moves output i if, and only if, j is visible to i (huggingface/transformers#39408)."""
    mixer, x = build(kind, token_shift=False, value_residual=False, **changes), tokens(1, 14)
    outputs = paths(mixer, x)
    for j in range(x.shape[1]):
        other = x.clone()
        other[:, j] += 1
        for y, z in zip(outputs, paths(mixer, other), strict=True):
            moved = (y - z).abs().amax((0, 2)) > 1e-9
            expected = [j in visible_keys(kind, i, mixer.options) for i in range(x.shape[1])]
            assert moved.tolist() == expected


@pytest.mark.parametrize("window", [40, 41, 1000])
def test_a_window_as_long_as_the_sequence_is_full_attention(window):
    """A window one token too wide or too narrow would show (Dao-AILab/flash-attention#1133)."""
    x = tokens(2, 40)
    sliding = build("sliding_window", window=window, rotary_dim=4)
    full = build("full", rotary_dim=4)
    for found, expected in zip(paths(sliding, x), paths(full, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("prompt", [1, 30, 31, 32, 33, 64, 100])
def test_decoding_past_a_sliding_window(prompt):
    """The cache stays right when the total reaches the window (huggingface/transformers#37574, #38156)."""
    mixer, x = build("sliding_window", window=32), tokens(1, prompt + 40)
    with torch.no_grad():
        expected, _ = mixer(x)
        found, state = in_pieces(mixer, x, [prompt, *[1] * 40])
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    assert state.position == prompt + 40
    assert state.k.shape[1] == 31


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_of_the_visible_pairs(kind):
    mixer = build(kind)
    options, products = mixer.options, 0
    for weight in (mixer.c_q, mixer.c_k, mixer.c_v, mixer.c_proj, mixer.v_gate1, mixer.v_gate2):
        products += weight.weight.numel()
    pair = 4 * mixer.num_heads * mixer.head_dim
    for length in (1, 7, 8, 30, 65):
        pairs = [len(visible_keys(kind, t, options)) for t in range(length)]
        assert mixer.flops_at(length - 1).differentiable == 2 * products + pair * pairs[-1]
        expected = 2 * products + pair * sum(pairs) / length
        assert mixer.flops_per_token(length).differentiable == pytest.approx(expected)
        assert mixer.flops_per_token(length).routing == 0


@pytest.mark.parametrize(("kind", "most"), [("sliding_window", 4 * 11), ("block_window", 4 * 16)])
def test_memory_held_while_decoding_is_bounded_by_the_window(kind, most):
    """The buffers behind the state, not only the part of them in use."""
    mixer, state = build(kind), None
    for piece in tokens(1, 300).split([150, *[1] * 150], 1):
        with torch.no_grad():
            _, state = mixer(piece, None, state)
        assert state.k.untyped_storage().nbytes() <= most * mixer.kv_width * 8


def test_the_cache_of_full_attention_doubles():
    """Decoding n tokens copies the cache a logarithmic number of times."""
    mixer, state, buffers = build("full"), None, set()
    with torch.no_grad():
        for piece in tokens(1, 300).split(1, 1):
            _, state = mixer(piece, None, state)
            buffers.add(state.k.untyped_storage().nbytes())
    assert len(buffers) <= 10


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (SlidingOptions, {"window": 0}, "window is 0; allowed: a whole number of 1 or more"),
        (SlidingOptions, {"window": 2.5}, "window is 2.5; allowed: a whole number of 1 or more"),
        (BlockOptions, {"chunk": 0}, "chunk is 0; allowed: a whole number of 1 or more"),
        (
            BlockOptions,
            {"window_chunks": True},
            "window_chunks is True; allowed: a whole number of 1 or more",
        ),
        (
            BlockOptions,
            {"chunk": 4, "sinks": 5},
            r"sinks is 5; allowed: a whole number from 0 to chunk \(4\)",
        ),
        (BlockOptions, {"sinks": -1}, "sinks is -1; allowed: a whole number from 0"),
    ],
)
def test_impossible_options_are_refused(cls, changes, message):
    with pytest.raises(LayerError, match=message):
        cls(**changes)


def test_paper_defaults():
    block = BlockOptions()
    assert (block.chunk, block.window_chunks, block.sinks) == (256, 3, 0)
    assert SlidingOptions().window == 256
    assert build("full", head_dim=16).rotary_dim == 8
    assert build("block_window", head_dim=16).rotary_dim == 8
    assert build("sliding_window", head_dim=16).rotary_dim == 16


def test_a_state_from_inference_mode_continues_outside_it():
    mixer, x = build("full", site=Site(HIDDEN)), tokens(1, 12)
    expected, _ = mixer(x)
    with torch.inference_mode():
        _, state = in_pieces(mixer, x[:, :8], [4, 1, 1, 1, 1])
    with torch.no_grad():
        found, _ = in_pieces(mixer, x[:, 8:], [1, 1, 1, 1], state)
    torch.testing.assert_close(found, expected[:, 8:], atol=1e-10, rtol=0)
