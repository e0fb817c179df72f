"""Every attention path against a written-out mask, in values and gradients."""

import contextlib
import functools
import math

import pytest
import torch

from hybrid.layers import LayerError
from hybrid.layers.softmax import Mask, Part, attention, block_window_attention, force_plain, kernels
from hybrid.layers.softmax.joined import Joint

PATHS = pytest.mark.parametrize("plain", [False, True], ids=["flash", "plain"])
H, G, D = 4, 2, 8


def path(plain):
    return force_plain() if plain else contextlib.nullcontext()


def qkv(tq, tk, batch=2, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = ((batch, tq, H, D), (batch, tk, G, D), (batch, tk, G, D))
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def written_out(q, k, v, visible):
    """Attention under a boolean mask `[Tq, Tk]`; rows without keys are 0."""
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D)
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.clamp(min=-1e30)[..., None])
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.detach()


def causal_mask(tq, tk, window=None):
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    return (j <= i) & (j > i - (window or tk + tq))


def check(got, want, inputs, tolerance=1e-10):
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)
    cotangent = torch.randn_like(got[0])
    mine = torch.autograd.grad(got[0], inputs, cotangent, retain_graph=True)
    theirs = torch.autograd.grad(want[0], inputs, cotangent)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


@PATHS
@pytest.mark.parametrize(("tq", "tk"), [(2, 5), (5, 2), (1, 1), (1, 9), (9, 9), (3, 40), (6, 1)])
def test_causal_alignment_is_bottom_right(plain, tq, tk):
    """Dao-AILab/flash-attention#951: also with more queries than keys, where the first queries see nothing
    and give 0."""
    inputs = qkv(tq, tk)
    with path(plain):
        got = attention(*inputs)
        check(got, written_out(*inputs, causal_mask(tq, tk)), inputs)
    assert (got[0][:, : max(0, tq - tk)] == 0).all()


@PATHS
def test_no_keys_at_all_gives_zero(plain):
    inputs = qkv(3, 0)
    with path(plain):
        out, lse = attention(*inputs)
        out.sum().backward()
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert torch.isfinite(inputs[0].grad).all()


@PATHS
def test_not_causal(plain):
    inputs = qkv(3, 7)
    with path(plain):
        check(attention(*inputs, causal=False), written_out(*inputs, torch.ones(3, 7, dtype=bool)), inputs)


@PATHS
@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 100])
@pytest.mark.parametrize(("tq", "tk"), [(16, 16), (11, 11), (1, 13), (5, 13), (9, 4), (6, 100)])
def test_sliding_window_counts_the_query_itself(plain, window, tq, tk):
    """huggingface/transformers#39408: exactly `window` keys, the query's own included, in every path."""
    inputs = qkv(tq, tk)
    with path(plain):
        check(attention(*inputs, window=window), written_out(*inputs, causal_mask(tq, tk, window)), inputs)


def test_a_token_reaches_exactly_the_window():
    """huggingface/transformers#39408: window 4, length 10: changing token 3 moves outputs 3 to 6, whole and
    step by step."""
    q, k, v = (x.detach() for x in qkv(10, 10))
    changed = v.clone()
    changed[:, 3] += 1
    whole = [attention(q, k, x, window=4)[0] for x in (v, changed)]
    steps = [
        torch.cat(
            [attention(q[:, i : i + 1], k[:, : i + 1], x[:, : i + 1], window=4)[0] for i in range(10)], 1
        )
        for x in (v, changed)
    ]
    for before, after in (whole, steps):
        moved = (before - after).abs().amax((0, 2, 3)) > 0
        assert moved.nonzero().flatten().tolist() == [3, 4, 5, 6]


def test_window_as_long_as_the_sequence_is_full_attention():
    q, k, v = qkv(10, 10, dtype=torch.float32)
    assert torch.equal(attention(q, k, v, window=10)[0], attention(q, k, v)[0])


def block_mask(position, tq, chunk, window_chunks, sinks):
    i, j = torch.arange(position, position + tq)[:, None], torch.arange(position + tq)
    return (j <= i) & ((j >= (i // chunk + 1 - window_chunks) * chunk) | (j < sinks))


@PATHS
@pytest.mark.parametrize("sinks", [0, 2, 4, 7])
@pytest.mark.parametrize(("chunk", "window_chunks"), [(4, 2), (4, 1), (1, 3), (3, 3), (50, 1)])
@pytest.mark.parametrize(("position", "tq"), [(0, 17), (0, 3), (13, 1), (9, 8), (8, 4), (12, 9)])
def test_block_window(plain, sinks, chunk, window_chunks, position, tq):
    tk = position + tq
    inputs = qkv(tq, tk)
    q, k, v = inputs
    want = written_out(*inputs, block_mask(position, tq, chunk, window_chunks, sinks))
    options = {"chunk": chunk, "window_chunks": window_chunks, "sinks": sinks, "position": position}
    start = max(0, (position // chunk + 1 - window_chunks) * chunk)
    with path(plain):
        check(block_window_attention(q, k, v, **options), want, inputs)
        cut = block_window_attention(
            q, k[:, start:], v[:, start:], **options, sink_k=k[:, :sinks], sink_v=v[:, :sinks]
        )
    torch.testing.assert_close(cut[0], want[0], atol=1e-10, rtol=0)


@PATHS
@pytest.mark.parametrize("kind", ["full", "sliding", "block"])
def test_packed_documents_equal_each_alone(plain, kind):
    lengths = (5, 1, 17, 8)
    inputs = qkv(31, 31, batch=1)
    run = {
        "full": attention,
        "sliding": lambda *x, **more: attention(*x, window=4, **more),
        "block": lambda *x, **more: block_window_attention(*x, chunk=4, window_chunks=2, sinks=1, **more),
    }[kind]
    with path(plain):
        alone = [run(*piece) for piece in zip(*(x.split(lengths, 1) for x in inputs), strict=True)]
        want = torch.cat([out for out, _ in alone], 1), torch.cat([lse for _, lse in alone], 2)
        check(run(*inputs, lengths=lengths), want, inputs)


def test_empty_documents_are_refused_in_words():
    """fla-org/flash-linear-attention#103: the CPU kernel would end the process on them."""
    q, k, v = qkv(2, 2, batch=1)
    for run in (attention, functools.partial(block_window_attention, chunk=4, window_chunks=2)):
        with pytest.raises(LayerError, match=r"lengths \(0, 1, 0, 1\); leave empty ones out"):
            run(q, k, v, lengths=(0, 1, 0, 1))


@pytest.mark.parametrize("head_size", [1, 7, 64, 256])
@pytest.mark.parametrize("mask", list(Mask))
def test_kernels_agree_on_strided_views(head_size, mask):
    """Also in the backward with a joint result: the output and log-sum-exp of more keys than the block's."""
    torch.manual_seed(0)
    tq, tk = (70, 70) if mask is not Mask.FULL else (33, 300)
    q, k, v, more_k, more_v, grad = (
        torch.randn(2, 2 * n, h, head_size, dtype=torch.float64)[:, ::2]
        for n, h in ((tq, H), (tk, G), (tk, G), (9, G), (9, G), (tq, H))
    )
    results = []
    for kernel in ("cpu", "plain"):
        joint = Joint(q)
        parts = [Part(mask=mask), Part(key=1)]
        joint.add(kernel, [q], [k, more_k], [v, more_v], parts, 0.2)
        out, lse = joint.result()
        results.append((out, lse, *kernels.backward(kernel, (grad, out, lse), q, k, v, mask, 0.2)))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 6])
def test_low_precision_is_close_and_keeps_its_dtype(dtype, window):
    inputs = qkv(20, 33)
    small = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse = attention(*small, window=window)
    want, want_lse = attention(*(x.double() for x in small), window=window)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=tolerance, rtol=0)
    out.float().square().sum().backward()
    assert all(x.grad.dtype == dtype for x in small)


def test_autocast_decides_the_dtype():
    q, k, v = qkv(5, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k.bfloat16(), v.bfloat16())[0].dtype == torch.bfloat16
    with pytest.raises(LayerError, match="one dtype"):
        attention(q, k.bfloat16(), v.bfloat16())


def test_shapes_that_do_not_fit_are_named():
    q, k, v = qkv(5, 5)
    with pytest.raises(LayerError, match="do not fit"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(LayerError, match=r"must be \[batch, tokens, heads, size\]"):
        attention(q[0], k[0], v[0])
    with pytest.raises(LayerError, match="window of position 9 is from 4"):
        block_window_attention(q[:, :1], k[:, :3], v[:, :3], chunk=4, window_chunks=2, position=9)
