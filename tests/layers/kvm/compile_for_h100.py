"""Compile the launches of a KVM call in bf16 for a GPU that is not there; print the shared memory of each."""

import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hybrid.layers.kvm.contributions import Norm, Sums
from hybrid.layers.kvm.spec import Budget, KVMSpec, updates
from hybrid.layers.kvm.steps import steps
from hybrid.layers.kvm.triton import read_group, read_group_backward, route_group


def launches() -> None:
    """Call each function once, at the sizes of a real layer."""
    chunk, size = 256, 128
    spec = KVMSpec(chunk, 2, 64, 1, Budget("power_law", factor=16.0), gate_appends=True)
    plan = steps(tuple(updates(spec, [2])), (0, 1, 1, 1), 2, chunk, torch.device("cpu"))
    keys, gate, norm = torch.zeros(3, 2, chunk, size), torch.zeros(3, 2, chunk), torch.ones(size)
    added = Sums(keys, keys, gate[..., None])
    before, slot = Sums(*(x[:1, :, :0] for x in added)), torch.zeros(gate.shape, dtype=torch.int64)
    group = before, added, slot, plan, spec, Norm(norm, norm)
    route_group(keys, gate, before.keys, plan, spec, Norm(norm, norm))
    read_keys, read_values, last = read_group(*group, torch.bfloat16)
    read_group_backward(*group, read_keys, read_values, last)


def main() -> None:
    h100 = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    run = JITFunction.run

    def compile_only(kernel, *args, **kwargs):
        print("bytes:", run(kernel, *args, **{**kwargs, "warmup": True}).metadata.shared)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict("os.environ", {"TRITON_CACHE_DIR": folder}),
        mock.patch.object(driver, "_active", h100),
        mock.patch.object(JITFunction, "run", compile_only),
    ):
        launches()


if __name__ == "__main__":
    main()
