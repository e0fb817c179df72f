"""Which kernel runs, and how the flash-attn packages are called (stand-ins with their signatures)."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest
import torch

from hybrid.layers import LayerError, backends
from hybrid.layers.backends import load_kernels
from hybrid.layers.errors import SlowPathWarning
from hybrid.layers.softmax import Mask, attention, flash, force_kernel, force_plain, kernels

from ...pretended_cuda import assert_aligned

SCALE = 0.3


def block(tokens=5, keys=5, heads=4, groups=2, size=8, dtype=torch.float32):
    torch.manual_seed(0)
    q = torch.randn(3, tokens, heads, size, dtype=dtype)
    return q, *(torch.randn(3, keys, groups, size, dtype=dtype) for _ in range(2))


@pytest.fixture
def packages(monkeypatch):
    """flash-attn 2.7 and its CuTe form, computing with plain matrix products."""

    def mask(causal):
        return Mask.LOWER if causal else Mask.FULL

    def v2_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0, -1, -1, 0)
        out, lse = kernels.forward("plain", q, k, v, mask(causal), softmax_scale)
        return out.to(q.dtype), lse, torch.empty(0), torch.empty(2)

    def v2_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        found = kernels.backward("plain", (dout, out, softmax_lse), q, k, v, mask(causal), softmax_scale)
        for own, made in zip((dq, dk, dv), found, strict=True):
            own.copy_(made)
        return torch.empty(0)

    def cute_forward(
        q, k, v, cu_seqlens_q=None, softmax_scale=None, causal=False, window_size_left=None, return_lse=False
    ):
        assert return_lse
        out, lse = kernels.forward("plain", q, k, v, mask(causal), softmax_scale)
        return out.to(q.dtype), lse

    def cute_backward(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, deterministic=False
    ):
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        return kernels.backward("plain", (dout, out, lse), q, k, v, mask(causal), softmax_scale)

    made = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    for name, pair in ((flash.V2, (v2_forward, v2_backward)), (flash.CUTE, (cute_forward, cute_backward))):
        module, *functions = flash.MODULES[name]
        made[module] = ModuleType(module)
        for function, own in zip(functions, pair, strict=True):
            setattr(made[module], function, own)
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.mark.parametrize("name", flash.MODULES)
@pytest.mark.parametrize("mask", [Mask.FULL, Mask.LOWER])
def test_a_flash_attn_package_takes_the_joint_output_in_its_backward(packages, name, mask):
    q, k, v = block()
    out, lse = kernels.forward("plain", q, k, v, mask, SCALE)
    for x, y in zip(kernels.forward(name, q, k, v, mask, SCALE), (out, lse), strict=True):
        torch.testing.assert_close(x, y)
    joint = (torch.randn_like(q), out + 1, lse + 0.5), q, k, v, mask, SCALE
    for x, y in zip(kernels.backward(name, *joint), kernels.backward("plain", *joint), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", flash.MODULES)
def test_a_forced_kernel_computes_a_whole_layer(packages, name):
    leaves = [x.requires_grad_() for x in block(tokens=9, keys=9)]
    with force_plain():
        want, _ = attention(*leaves, causal=True)
    with force_kernel(name):
        y, _ = attention(*leaves, causal=True)
        with force_plain():
            assert kernels.choose(leaves[0]) == "plain"
    torch.testing.assert_close(y, want)
    grad = torch.randn_like(y)
    for a, b in zip(
        torch.autograd.grad(y, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_the_newer_package_runs_where_it_gains_something(packages, monkeypatch):
    assert flash.fitting(128, 9, 8192) == flash.CUTE
    assert flash.fitting(128, 9, 256) is None  # a call takes longer on the host than on the GPU
    assert flash.fitting(192, 9, 8192) is None  # heads too large for it
    assert flash.fitting(128, 8, 8192) is None  # a GPU too old for it
    monkeypatch.setitem(sys.modules, flash.MODULES[flash.CUTE][0], None)  # not to be imported
    load_kernels.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert flash.fitting(128, 9, 8192) is None


def _older_forward(q, k, v, softmax_scale=None, causal=False):
    raise AssertionError("called without its log-sum-exp")


@pytest.mark.parametrize("missing", ["return_lse", "cutlass"])
def test_an_unfinished_cute_package_is_left_alone_without_a_word(packages, monkeypatch, missing):
    """flash-attn from 2.8.0 ships an old `flash_attn/cute`, without the packages that it needs."""
    module = sys.modules[flash.MODULES[flash.CUTE][0]]
    if missing == "return_lse":
        monkeypatch.setattr(module, "_flash_attn_fwd", _older_forward)
    else:
        monkeypatch.delitem(sys.modules, flash.MODULES[flash.CUTE][0])
        gone = ModuleNotFoundError("No module named 'cutlass'", name="cutlass")
        monkeypatch.setattr(backends.importlib, "import_module", lambda _: (_ for _ in ()).throw(gone))
    load_kernels.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flash.functions(flash.CUTE) is None


def test_deterministic_algorithms_are_asked_of_the_cute_package_too(packages):
    q, k, v = block()
    out, lse = kernels.forward("plain", q, k, v, Mask.FULL, SCALE)
    torch.use_deterministic_algorithms(True)
    try:
        kernels.backward(flash.CUTE, (out, out, lse), q, k, v, Mask.FULL, SCALE)  # the stand-in asserts it
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("room", [128, 144, 147, 1155])
def test_what_a_cuda_kernel_cannot_load_is_copied(room):
    x = torch.randn(2, 5, room, dtype=torch.bfloat16)
    v = x[..., 16:144].unflatten(-1, (1, -1)) if room > 128 else x.unflatten(-1, (2, -1))
    found = kernels.loadable(v)
    assert torch.equal(found, v)
    assert (found is v) == (room % 8 == 0)
    assert_aligned(found)
    assert_aligned(kernels.loadable(x[..., 1:121].unflatten(-1, (1, -1))))  # the offset alone


def test_without_the_packages_torchs_own_kernels_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    load_kernels.cache_clear()
    assert flash.fitting(128, 9, 8192) is None
    load_kernels.cache_clear()
    assert kernels.choose(block()[0]) == "cpu"


def test_heads_that_no_fast_kernel_takes_are_told_once():
    kernels._plain_head.cache_clear()
    q, k, v = block(size=264)
    with pytest.warns(SlowPathWarning, match="heads of 264 features"):
        y, _ = attention(q, k, v, causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = attention(q, k, v, causal=True)
    with force_plain():
        want, _ = attention(q, k, v, causal=True)
    assert torch.equal(y, want)
    assert torch.equal(again, want)


def test_an_unknown_kernel_is_named():
    with (
        pytest.raises(LayerError, match=r"no attention kernel 'fast'; there are: plain, cpu, cuda"),
        force_kernel("fast"),
    ):
        pass
