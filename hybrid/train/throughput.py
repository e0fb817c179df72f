"""How fast steps go, on what memory, and how near that is to what the device can do."""

from __future__ import annotations

import math
import resource
import sys
import time
from dataclasses import dataclass

import torch

from hybrid.distributed.world import World
from hybrid.recipe.schema import MonitorSection, Recipe

PEAK_TFLOPS = {
    ("H200", "bf16"): 989.0, ("H100", "bf16"): 989.0, ("A100", "bf16"): 312.0, ("L40S", "bf16"): 362.0,
    ("A10", "bf16"): 125.0, ("4090", "bf16"): 165.0, ("V100", "fp32"): 15.7, ("H200", "fp32"): 67.0,
    ("H100", "fp32"): 67.0, ("A100", "fp32"): 19.5, ("L40S", "fp32"): 91.6, ("A10", "fp32"): 31.2,
    ("4090", "fp32"): 82.6,
}  # fmt: skip
"""Dense peaks from the vendors' data sheets (TFLOP/s, without sparsity; fp32 without TF32)."""


@dataclass
class _Totals:
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0


class Throughput:
    """Times steps, over the whole call and since the last report; validation and checkpoints are left out."""

    def __init__(self, recipe: Recipe, flops_per_token: float, world: World) -> None:
        """`flops_per_token`: of training, at the recipe's context, as if no document ended in a window."""
        self._world, self._flops = world, flops_per_token
        peak = peak_flops(recipe.monitor, world.device, recipe.train.precision) if world.main else None
        self._peak = peak * world.size if peak else None
        self._all, self._window = _Totals(), _Totals()

    def add(self, seconds: float, waited: float, tokens: int) -> None:
        """Count a step: its time, of that the wait for data, and its tokens over all ranks."""
        for totals in (self._all, self._window):
            totals.steps += 1
            totals.seconds += seconds
            totals.waited += waited
            totals.tokens += tokens

    @property
    def seconds_per_step(self) -> float:
        return self._all.seconds / max(1, self._all.steps)

    @property
    def tokens_per_second(self) -> float:
        return self._all.tokens / self._all.seconds if self._all.seconds else 0.0

    def report(self) -> dict[str, float]:
        """Compute values over the steps since the last call, memory over the run; every rank calls it."""
        window, self._window = self._window, _Totals()
        flops = self._flops * window.tokens / window.seconds
        values = {
            "speed/tokens_per_second": window.tokens / window.seconds,
            "speed/step_seconds": window.seconds / window.steps,
            "speed/data_wait": window.waited / window.seconds,
            "speed/tflops": flops / 1e12,
            "memory/peak_gib": peak_memory(self._world) / 2**30,
        }
        if self._peak:
            values["speed/utilisation"] = flops / self._peak
        return values


def peak_memory(world: World) -> int:
    """Find the bytes of the process that has needed most; every rank calls it."""
    return int(world.gather_numbers([memory_bytes(world.device)]).max())


def memory_bytes(device: torch.device) -> int:
    """Read the most memory this process has held: of the GPU's, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def peak_flops(section: MonitorSection, device: torch.device, precision: str) -> float | None:
    """Look up the FLOP/s one process' device can do at most; None for a GPU the table lacks.

    A CPU's is measured by a matrix product with this process' threads, in a fifth of a second.
    """
    if section.peak_tflops is not None:
        return section.peak_tflops * 1e12
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for (gpu, kind), peak in PEAK_TFLOPS.items() if gpu in name and kind == precision]
        return known[0] * 1e12 if known else None
    size, best = 512, math.inf
    a = torch.ones(size, size)
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
