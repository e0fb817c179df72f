"""How the linear mixers call flash-linear-attention: against stand-ins here, against the kernels on a GPU."""

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hybrid.layers import Context, backends
from hybrid.layers.errors import SlowPathWarning
from hybrid.layers.linear import fla
from hybrid.layers.softmax import force_plain

from ..parity.linear_reference import convolve, delta_steps, ssd_steps
from .mixers import assert_same_gradients, assert_same_state, build, gradients, packed_context, tokens
from .test_across import in_parts, operands

KINDS = ("gated_deltanet", "kimi_delta", "mamba2")
every_kind = pytest.mark.parametrize("kind", KINDS)


def by_document(steps, tensors: list[Tensor], state: Tensor | None, cu_seqlens: Tensor | None):
    """`steps` over each document of a packed row, with one state per document, or over equal rows."""
    if cu_seqlens is None:
        return steps(*tensors, state)
    assert cu_seqlens.dtype == torch.int64
    assert state is None
    outs, states = [], []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        o, after = steps(*(x[:, start:end] for x in tensors), None)
        outs.append(o)
        states.append(after)
    return torch.cat(outs, 1), torch.cat(states)


# fla-core 0.6.0's arguments, of which only those with a default may be left out.


def delta(
    *, q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    cu_seqlens_cpu=None, use_qk_l2norm_in_kernel=False,
):  # fmt: skip
    assert output_final_state
    if use_qk_l2norm_in_kernel:
        q, k = (x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    assert initial_state is None or initial_state.dtype == torch.float64
    q = q * (scale * q.shape[-1] ** 0.5)
    return by_document(delta_steps, [q, k, v, g, beta], initial_state, cu_seqlens)


def simple_gla(
    *, q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    cu_seqlens_cpu=None,
):  # fmt: skip
    assert output_final_state
    assert q.shape[2] == v.shape[2]

    def steps(q, k, v, g, state):
        o, after = ssd_steps(v, k, q * scale, g, None if state is None else state.mT)
        return o, after.mT

    return by_document(steps, [q, k, v, g], initial_state, cu_seqlens)


def causal_conv1d(
    *, x, weight, bias=None, initial_state=None, output_final_state=False, activation=None, cu_seqlens=None,
    cu_seqlens_cpu=None,
):  # fmt: skip
    assert activation == "silu"
    if cu_seqlens is None:
        return convolve(x, weight[:, None], bias, initial_state)
    assert (initial_state, output_final_state) == (None, False)
    pieces = x.split(cu_seqlens_cpu.diff().tolist(), 1)
    return torch.cat([convolve(piece, weight[:, None], bias, None)[0] for piece in pieces], 1), None


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins for fla's functions that can run anywhere; the names of those called."""
    called: list[str] = []
    modules: dict[str, ModuleType] = {}

    def stand_in(name: str, function):
        def run(**arguments):
            called.append(name)
            if name.startswith("fused_recurrent"):
                assert "cu_seqlens_cpu" not in arguments  # which they do not have
            elif arguments["cu_seqlens"] is not None:
                assert torch.equal(arguments["cu_seqlens"], arguments["cu_seqlens_cpu"])
            return function(**arguments)

        return run

    for module, function, names in (
        ("gated_delta_rule", delta, ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")),
        ("kda", delta, ("chunk_kda", "fused_recurrent_kda")),
        ("simple_gla", simple_gla, ("chunk_simple_gla", "fused_recurrent_simple_gla")),
    ):
        made = modules[f"fla.ops.{module}"] = ModuleType(f"fla.ops.{module}")
        for name in names:
            setattr(made, name, stand_in(name, function))
    conv = modules["fla.modules.causal_conv1d"] = ModuleType("fla.modules.causal_conv1d")
    conv.causal_conv1d = causal_conv1d
    modules["fla.modules"] = ModuleType("fla.modules")
    for name, made in {"fla": ModuleType("fla"), "fla.ops": ModuleType("fla.ops"), **modules}.items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(fla, "on_supported_gpu", lambda device, dtype: True)
    backends.load_kernels.cache_clear()
    yield called
    backends.load_kernels.cache_clear()


@every_kind
def test_kernels_are_called_with_what_gives_the_same_values_and_gradients(kind, calls):
    mixer, x = build(kind), tokens(2, 90).requires_grad_()
    y, state = mixer(x[:, :70])
    y_more, after = mixer(x[:, 70:], None, state)
    assert len(calls) == 2
    assert all(name.startswith("chunk_") for name in calls)
    found = gradients(mixer, x, torch.cat((y, y_more), 1))
    with force_plain():
        expected, wanted = mixer(x)
        assert len(calls) == 2
    torch.testing.assert_close(torch.cat((y, y_more), 1), expected, atol=1e-10, rtol=0)
    assert_same_state(after, wanted, 1e-10)
    assert_same_gradients(found, gradients(mixer, x, expected), 1e-10)


@every_kind
def test_kernels_get_packed_documents_in_one_call(kind, calls):
    mixer, x, lengths = build(kind), tokens(1, 80), [5, 33, 1, 41]
    y, _ = mixer(x, packed_context(x, lengths, want_state=False))
    assert len(calls) == 1
    with force_plain():
        expected, _ = mixer(x, packed_context(x, lengths, want_state=False))
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)


@every_kind
def test_short_calls_without_gradients_run_the_recurrent_kernel(kind, calls):
    mixer, x = build(kind), tokens(1, 3)
    with torch.no_grad():
        _, state = mixer(x)
        mixer(x[:, :1], None, state)
    assert len(calls) == 2
    assert all(name.startswith("fused_recurrent_") for name in calls)
    mixer(x)
    assert calls[-1].startswith("chunk_")


def test_torch_computes_where_kernels_cannot():
    for dtype in (torch.float32, torch.bfloat16):
        assert fla.fla_kernel("fla.ops.kda:{}_kda", torch.zeros(1, 1), 64, dtype) is None


def test_wide_keys_are_not_for_the_kernels(calls):
    assert fla.fla_kernel("fla.ops.kda:{}_kda", torch.zeros(1, 1), 256, torch.bfloat16) is not None
    assert fla.fla_kernel("fla.ops.kda:{}_kda", torch.zeros(1, 1), 257, torch.bfloat16) is None


def test_a_broken_installation_is_told_and_torch_computes(calls):
    with pytest.warns(SlowPathWarning, match="fla.ops.kda:no_such cannot be loaded"):
        assert fla.fla_kernel("fla.ops.kda:no_such", torch.zeros(1, 1), 64, torch.bfloat16) is None


needs_kernels = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("fla") is None,
    reason="needs a CUDA device and flash-linear-attention",
)


@needs_kernels
@every_kind
def test_kernels_agree_with_torch_on_the_gpu(kind):
    """bf16 kernels against fp32 torch with the same weights: whole, in two calls, packed."""
    sizes = {"mamba2": {"num_heads": 4, "n_groups": 1, "state_size": 64}}
    changes = {"num_heads": 4, "num_v_heads": 4, "head_k_dim": 64, "head_v_dim": 64}
    mixer = build(kind, torch.bfloat16, **sizes.get(kind, changes)).cuda()
    exact = build(kind, torch.float32, **sizes.get(kind, changes)).cuda()
    exact.load_state_dict(mixer.state_dict())
    x = tokens(1, 200, torch.bfloat16).cuda()
    one, two = x.clone().requires_grad_(), x.float().requires_grad_()
    y, state = mixer(one[:, :130])
    y_more, after = mixer(one[:, 130:], None, state)
    with force_plain():
        expected, wanted = exact(two)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(torch.cat((y, y_more), 1).float(), expected, atol=0.03 * scale, rtol=0)
    for name, tensor in after.tensors().items():
        other = wanted.tensors()[name]
        assert float((tensor.float() - other).abs().max()) <= 0.03 * float(other.abs().max()), name
    found, want = gradients(mixer, one, torch.cat((y, y_more), 1)), gradients(exact, two, expected)
    for name, tensor in found.items():
        assert float((tensor.float() - want[name]).abs().max()) <= 0.05 * float(want[name].abs().max()), name
    lengths = [50, 1, 149]
    packed, _ = mixer(x, packed_context(x, lengths, want_state=False))
    alone = torch.cat([mixer(piece, Context.of(piece))[0] for piece in x.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=0.02 * scale, rtol=0)


@pytest.mark.parametrize("name", ["gated_deltanet", "kimi_delta", "ssd"])
def test_shards_run_the_kernels(name, calls):
    """Also the part whose start is not known yet, with the columns that carry its transition."""
    across, tokens_of = operands(name, 1)
    found = in_parts(across, tokens_of, 2, (30, 110))
    assert len(calls) == 2
    with force_plain():
        expected, _ = across.operator(**tokens_of, lengths=(30, 110))
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("setting", ["allow_tf32", "fp32_precision"])
def test_full_precision_is_set_and_given_back_whichever_way_tf32_was_allowed(setting):
    """torch 2.9 and later refuse to read the older setting where anybody has used the newer one."""
    code = f"""
import torch
from hybrid.layers import backends
matmul = torch.backends.cuda.matmul
matmul.{setting} = {"True" if setting == "allow_tf32" else "'tf32'"}
class OnGpu:
    device = torch.device("cuda")
with backends.full_precision(OnGpu):
    assert matmul.fp32_precision == "ieee"
assert matmul.fp32_precision == "tf32"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
