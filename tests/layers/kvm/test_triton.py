"""The Triton kernels, on a machine without a GPU: run by Triton's interpreter, and compiled for a GPU."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid.layers.kvm.contributions import Norm, Sums
from hybrid.layers.kvm.spec import Budget, KVMSpec, updates

triton = pytest.importorskip("triton")

H100_SHARED_MEMORY = 227 << 10  # bytes that a program may use


def test_kernels_in_the_interpreter():
    """In a process of its own, as triton looks for the interpreter when it is imported."""
    cases = Path(__file__).with_name("triton_interpreted.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        str(cases),
    ]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_kernels_compile_for_an_h100(monkeypatch, tmp_path):
    """The launches of a call in bf16, by the compiler for a GPU that is not there, fit its shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    h100 = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    compiled, run = [], JITFunction.run

    def compile_only(kernel, *args, **kwargs):
        compiled.append(run(kernel, *args, **{**kwargs, "warmup": True}))

    monkeypatch.setattr(driver, "_active", h100)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from hybrid.layers.kvm.triton import read_group, read_group_backward, route_group

    chunk, size = 256, 128
    spec = KVMSpec(chunk, 2, 64, 1, Budget("power_law", factor=16.0), gate_appends=True)
    steps = SimpleNamespace(
        updates=updates(spec, [2]), readers=(0, 1, 1, 1), table=torch.zeros(4, 5, dtype=torch.int32)
    )
    keys, gate, norm = torch.zeros(3, 2, chunk, size), torch.zeros(3, 2, chunk), torch.ones(size)
    added = Sums(keys, keys, gate[..., None])
    before, slot = Sums(*(x[:1, :, :0] for x in added)), torch.zeros(gate.shape, dtype=torch.int64)
    group = before, added, slot, steps, spec, Norm(norm, norm)
    route_group(keys, gate, before.keys, steps, spec, Norm(norm, norm))
    read_keys, read_values, last = read_group(*group, torch.bfloat16)
    read_group_backward(*group, read_keys, read_values, last)
    assert len(compiled) == 5
    assert max(kernel.metadata.shared for kernel in compiled) <= H100_SHARED_MEMORY
