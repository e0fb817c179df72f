"""RWKV-7: the stored vectors, the recurrence in both forms, shared values, start values, accounts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hybrid.layers import Context, LayerError, Site, mixer_class
from hybrid.layers import rwkv7 as module
from hybrid.layers.linear import chunked as chunks
from hybrid.layers.linear import fla, rwkv7_op
from hybrid.layers.linear.rwkv7_op import LEAST_LOG_DECAY, chunked, rwkv7_recurrence, steps
from hybrid.layers.rwkv7 import RWKV7, RWKV7Options, low_ranks
from hybrid.verify.mixers import run_layer, run_operator

from ..parity import vectors
from ..parity.rwkv7_reference import recurrence, reference
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


@vectors.parametrize("rwkv7")
def test_layer_vectors_hold(case):
    vectors.assert_holds(case)


@vectors.parametrize("rwkv7")
def test_values_on_the_way_hold(case, monkeypatch):
    seen = {}

    def spy(**given):
        out = rwkv7_recurrence(**given)
        names = {"r": "r", "log_decay": "log_w", "k": "k", "v": "v", "a": "a", "b": "b"}
        seen.update({f"mid.{theirs}": given[ours] for ours, theirs in names.items()} | {"mid.wkv": out[0]})
        return out

    monkeypatch.setattr(module.RECURRENCE, "operator", spy)
    stored = case.tensors()
    run_layer(case, stored)
    vectors.assert_near(case, stored, {name: x for name, x in seen.items() if name in stored})
    assert len(seen) == 7


@vectors.parametrize("rwkv7_op")
@pytest.mark.parametrize("form", [steps, chunked])
def test_operator_vectors_hold(case, form):
    """fla-org/flash-linear-attention#494: from a given, not symmetric state."""
    stored = case.tensors()
    vectors.assert_within(case, stored, run_operator(case, stored, form), 1e-5)


@vectors.parametrize("rwkv7_init")
def test_start_values_are_the_stored_ones(case):
    vectors.assert_holds(case)
    assert len(case.tensors()) >= 14 * case.config["num_layers"]


# The recurrence


def operands(batch=2, length=100, heads=3, key=16, value=24, dtype=torch.float64, decay=None):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    r, k = draw(batch, length, heads, key), 0.3 * draw(batch, length, heads, key)
    log_decay = rwkv7_op.LEAST_LOG_DECAY * torch.sigmoid(2 * draw(batch, length, heads, key))
    if decay is not None:
        log_decay = torch.full_like(log_decay, decay)
    kappa = torch.nn.functional.normalize(draw(batch, length, heads, key), dim=-1)
    b = kappa * torch.sigmoid(draw(batch, length, heads, key))
    made = [r, log_decay, k, draw(batch, length, heads, value), -kappa, b, draw(batch, heads, key, value)]
    return [x.to(dtype).requires_grad_() for x in made]


def value_and_gradients(result, given):
    out, state = result
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, state)]
    loss = (out * weights[0]).sum() + (state * weights[1]).sum()
    return [out, state, *torch.autograd.grad(loss, given)]


def assert_equal(found, expected, tolerance):
    for one, two in zip(found, expected, strict=True):
        scale = float(two.detach().abs().max())
        torch.testing.assert_close(one, two, atol=tolerance * scale, rtol=0, check_dtype=False)


@pytest.mark.parametrize("length", LENGTHS)
def test_both_forms_are_the_recurrence(length):
    """fla-org/flash-linear-attention#494 and #88: outputs, final state and all gradients, from a state."""
    given = operands(length=length)
    expected = value_and_gradients(recurrence(*given), given)
    assert_equal(value_and_gradients(steps(*given), given), expected, 1e-12)
    assert_equal(value_and_gradients(chunked(*given), given), expected, 1e-12)


@pytest.mark.parametrize("decay", [0.0, -1e-6, rwkv7_op.LEAST_LOG_DECAY])
def test_chunks_are_exact_in_fp32_at_the_limits_of_the_decay(decay):
    exact = operands(length=150, decay=decay)
    expected = value_and_gradients(recurrence(*exact), exact)
    given = [x.detach().float().requires_grad_() for x in exact]
    assert_equal(value_and_gradients(chunked(*given), given), expected, 5e-6)


def test_groups_of_chunks_join_without_a_seam(monkeypatch):
    given = operands(length=300)
    whole = value_and_gradients(chunked(*given), given)
    monkeypatch.setattr(chunks, "GROUP_ROWS", 1)
    assert_equal(value_and_gradients(chunked(*given), given), whole, 1e-13)


def test_packed_documents_start_from_zero():
    lengths = [1, 70, 64, 5, 130]
    given = operands(batch=1, length=sum(lengths))[:-1]
    out, state = rwkv7_recurrence(*given, lengths=lengths)
    alone = [rwkv7_recurrence(*piece) for piece in zip(*(x.split(lengths, 1) for x in given), strict=True)]
    torch.testing.assert_close(out, torch.cat([o for o, _ in alone], 1))
    torch.testing.assert_close(state, alone[-1][1])


def test_the_recurrence_computes_in_fp32_whatever_it_is_given():
    given = [x.detach().bfloat16() for x in operands(length=20)]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = rwkv7_recurrence(*given[:-1], state=given[-1])
    expected, expected_state = recurrence(*(x.double() for x in given))
    assert out.dtype == state.dtype == torch.float32
    assert_equal([out, state], [expected, expected_state], 1e-6)


# The layer


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("options", [{}, {"token_shift": False}, {"value_residual": False}])
def test_outputs_and_gradients_match_the_stepwise_twin(length, options):
    """fla-org/flash-linear-attention#88, at a layer that takes the shared values of another."""
    mixer = build("rwkv7", site=Site(HIDDEN, 2, 5, first_of_kind=False), **options)
    x, first = tokens(2, length).requires_grad_(), tokens(2, length, seed=5)
    shared = first if mixer.options.value_residual else None
    expected = reference(x, dict(mixer.named_parameters()), 4, shared)
    y, state = mixer(x, Context.of(x, first_values={"rwkv7": first}))
    torch.testing.assert_close(y, expected.y, atol=1e-10, rtol=0)
    torch.testing.assert_close(state.recurrent, expected.recurrent, atol=1e-10, rtol=0)
    assert_same_gradients(gradients(mixer, x, y), gradients(mixer, x, expected.y), 1e-10)


def test_the_first_layer_shares_its_own_values_and_its_value_gate_does_nothing():
    mixer, x = build("rwkv7", site=Site(HIDDEN, 0, 5)), tokens(2, 30).requires_grad_()
    context = Context.of(x, embedding=x * 1)  # the same numbers, as for a packed document
    y, _ = mixer(x, context)
    expected = reference(x, dict(mixer.named_parameters()), 4)
    torch.testing.assert_close(y, expected.y)
    torch.testing.assert_close(context.first_values["rwkv7"], expected.value)
    found = gradients(mixer, x, y)
    assert all(not found[name].any() for name in ("v0", "v1.weight", "v2.weight"))
    assert found["value.weight"].any()


def hybrid_pair():
    """The kind's first layer, not the model's, with its input and the embeddings it shares values from."""
    mixer = build("rwkv7", site=Site(HIDDEN, 1, 4, first_of_kind=True))
    return mixer, tokens(2, 40), tokens(2, 40, seed=8)


def test_later_in_the_model_the_shared_values_are_those_of_the_shifted_embedding():
    mixer, x, embedding = hybrid_pair()
    context = Context.of(x, embedding=embedding)
    y, _ = mixer(x, context)
    p = dict(mixer.named_parameters())
    shared = reference(embedding, p, 4).value
    torch.testing.assert_close(context.first_values["rwkv7"], shared)
    torch.testing.assert_close(y, reference(x, p, 4, shared).y)


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [13, 1, 26]])
def test_decoding_shifts_the_embedding_with_the_embedding_before_it(cuts):
    """The public code takes the layer's real last input there: its decoding differs from its prefill."""
    mixer, x, embedding = hybrid_pair()
    whole = Context.of(x, embedding=embedding)
    y, expected = mixer(x, whole)
    state, found, shared = None, [], []
    for piece, own in zip(x.split(cuts, 1), embedding.split(cuts, 1), strict=True):
        context = Context.of(piece, embedding=own)
        out, state = mixer(piece, context, state)
        found.append(out)
        shared.append(context.first_values["rwkv7"])
    torch.testing.assert_close(torch.cat(found, 1), y)
    torch.testing.assert_close(torch.cat(shared, 1), whole.first_values["rwkv7"])
    assert_same_state(state, expected, 1e-10)
    assert state.nbytes == 2 * mixer.state_bytes(40, 8)
    assert state.tensors().keys() == mixer.empty_state(2).tensors().keys()


def test_packed_documents_shift_the_embedding_within_themselves():
    mixer, x, embedding = hybrid_pair()
    x, embedding, lengths = x[:1], embedding[:1], [12, 1, 27]
    kept, bare = (packed_context(x, lengths, embedding=embedding, want_state=want) for want in (True, False))
    y = mixer(x, kept)[0]
    torch.testing.assert_close(mixer(x, bare)[0], y)
    torch.testing.assert_close(bare.first_values["rwkv7"], kept.first_values["rwkv7"])
    alone = Context.of(x[:, 13:], embedding=embedding[:, 13:])
    torch.testing.assert_close(mixer(x[:, 13:], alone)[0], y[:, 13:])


def test_a_layer_without_its_kinds_first_values_says_so():
    mixer = build("rwkv7", site=Site(HIDDEN, 3, 5, first_of_kind=False))
    with pytest.raises(LayerError, match=r"layer 3 \(rwkv7\) needs the first rwkv7 layer's values"):
        mixer(tokens(1, 4))
    wrong = torch.zeros(1, 4, HIDDEN - 8)
    with pytest.raises(LayerError, match="values of width 32, but the first rwkv7 layer shares"):
        mixer(tokens(1, 4), Context.of(tokens(1, 4), first_values={"rwkv7": wrong}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_is_wide_and_the_shift_narrow(dtype):
    mixer, x = build("rwkv7", dtype), tokens(2, 20, dtype)
    _, state = in_pieces(mixer, x, [16, 4])
    assert state.recurrent.dtype == torch.float32
    assert state.recurrent.shape == (2, 4, 8, 8)
    assert state.shift.dtype == dtype
    assert torch.equal(state.shift, x[:, -1])
    assert state.shift_first is None


# Start values and options


def test_random_start_values_are_orthogonal():
    mixer = RWKV7(RWKV7Options(num_heads=2), Site(64, 1, 3))
    eye = torch.eye(64)
    for name, gain in (("receptance", 1.0), ("key", 0.1), ("value", 1.0)):
        weight = mixer.get_parameter(f"{name}.weight").detach()
        torch.testing.assert_close(weight @ weight.T, gain**2 * eye, atol=1e-5, rtol=0)
    for name in "wavg":
        weight = mixer.get_parameter(f"{name}2.weight").detach()
        torch.testing.assert_close(weight.T @ weight, 0.01 * eye[:32, :32], atol=1e-6, rtol=0)
        assert not mixer.get_parameter(f"{name}1.weight").any()
    assert not mixer.output.weight.any()


def test_one_layer_alone_has_finite_start_values():
    mixer = RWKV7(RWKV7Options(num_heads=2), Site(32))
    assert all(torch.isfinite(p).all() for p in mixer.parameters())
    i = torch.arange(32) / 31
    u = (torch.arange(32) % 16 - 7.5) / 7.5
    torch.testing.assert_close(mixer.w0.detach(), -5.5 + 6 * i + 2.5 * u * u.abs())


@pytest.mark.parametrize(
    ("size", "wa", "v", "g"),
    [(32, 32, 32, 32), (256, 32, 32, 64), (512, 32, 32, 96), (768, 64, 32, 128), (1024, 64, 32, 160),
     (1536, 64, 64, 224), (2048, 96, 64, 256), (2560, 96, 64, 320), (4096, 128, 96, 480)],
)  # fmt: skip
def test_low_rank_widths(size, wa, v, g):
    assert low_ranks(size) == {"w": wa, "a": wa, "v": v, "g": g}


def test_options_are_checked():
    for wrong in ({"num_heads": 0}, {"head_dim": 1}, {"token_shift": 1}, {"value_residual": "yes"}):
        with pytest.raises(LayerError, match=next(iter(wrong))):
            RWKV7Options(**wrong)
    for options, size in ((RWKV7Options(), 96), (RWKV7Options(num_heads=5), 64), (RWKV7Options(3, 16), 64)):
        with pytest.raises(LayerError, match=f"hidden_size {size}"):
            RWKV7(options, Site(size))
    assert RWKV7.heads(RWKV7Options(), 256) == (4, 64)
    assert RWKV7.heads(RWKV7Options(num_heads=2), 64) == (2, 32)
    assert mixer_class("rwkv7") is RWKV7


def test_vectors_are_not_decayed_and_matrices_are():
    mixer = build("rwkv7")
    matrices = {name for name, _ in mixer.named_parameters() if name not in mixer.no_decay()}
    low = {f"{name}{i}.weight" for name in "wavg" for i in (1, 2)}
    assert matrices == low | {f"{name}.weight" for name in ("receptance", "key", "value", "output")}


def test_flops_are_those_counted_in_decoding():
    for site in (Site(HIDDEN), Site(HIDDEN, 1, 3), Site(HIDDEN, 2, 3, first_of_kind=False)):
        mixer, x = build("rwkv7", site=site), tokens(1, 1)
        context = Context.of(x, embedding=x + 1)
        if not site.first_of_kind:
            context.first_values["rwkv7"] = x
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            mixer(x, context, mixer.empty_state(1))
        assert counter.get_total_flops() == mixer.flops_at(17).forward
        assert mixer.flops_per_token(100) == mixer.flops_at(0)
        assert mixer.flops_at(0).routing == 0


def test_the_switch_for_plain_torch_and_missing_kernels_change_nothing():
    from hybrid.layers.softmax import force_plain

    mixer, x = build("rwkv7", torch.float32), tokens(1, 70, torch.float32)
    y, _ = mixer(x)
    with force_plain():
        assert torch.equal(mixer(x)[0], y)


@pytest.mark.parametrize(
    ("length", "grad", "form"),
    [
        (70, True, "chunk"),
        (20, True, "chunk"),
        (70, False, "chunk"),
        (20, False, "fused_recurrent"),
    ],
)
def test_how_the_kernels_are_called(monkeypatch, length, grad, form):
    """By keyword, scale 1, 16-bit operands with a wide decay, an fp32 state."""
    asked = []

    def kernel(*, r, w, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens, lower_bound=None):
        assert lower_bound == (LEAST_LOG_DECAY if form == "chunk" else None)
        assert {x.dtype for x in (r, k, v, a, b)} == {torch.bfloat16}
        assert w.dtype == initial_state.dtype == torch.float32
        assert (scale, output_final_state, cu_seqlens) == (1.0, True, None)
        return steps(*(x.float() for x in (r, w, k, v, a, b)), initial_state)

    def found(*names):
        asked.append(names)
        return (kernel,)

    monkeypatch.setattr(fla, "on_supported_gpu", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(fla, "load_kernels", found)
    given = [x.detach().float() for x in operands(length=length)]
    with torch.set_grad_enabled(grad):
        out, state = rwkv7_recurrence(*given[:-1], state=given[-1], dtype=torch.bfloat16)
    assert asked == [("fla", f"fla.ops.rwkv7.{form}", f"{form}_rwkv7")]
    expected = recurrence(*(x if i in (1, 6) else x.bfloat16().float() for i, x in enumerate(given)))
    assert_equal([out, state], expected, 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and flash-linear-attention")
@pytest.mark.parametrize("lengths", [(), (30, 100, 70)])
def test_the_kernels_agree_with_torch(lengths):
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    from hybrid.layers.softmax import force_plain

    given = [x.detach().cuda() for x in operands(batch=1, length=200, key=64, value=64, dtype=torch.float32)]
    state = None if lengths else given[-1]
    given = [x if i == 1 else x.bfloat16() for i, x in enumerate(given[:-1])]
    given = [x.requires_grad_() for x in given]
    results = []
    for plain in (False, True):
        with force_plain(plain):
            result = rwkv7_recurrence(*given, state=state, lengths=lengths)
            out, after = result[0].float(), result[1]
            loss = (out * torch.sin(out.detach())).sum() + after.sum()
            results.append([out, after, *(g.float() for g in torch.autograd.grad(loss, given))])
    assert_equal(*results, 3e-2)
    with torch.no_grad():
        few = [x[:, :1] for x in given]
        fast = rwkv7_recurrence(*few, state=state)
        with force_plain():
            assert_equal([x.float() for x in fast], rwkv7_recurrence(*few, state=state), 2e-2)
    assert math.isfinite(float(fast[0].float().sum()))
