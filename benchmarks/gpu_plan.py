"""Sizes and times of what `benchmarks.gpu` does on a GPU, and of the same on a CPU at tiny sizes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybrid.text import duration

from . import ROOT
from .measure import Run, alternate
from .workloads import QUICK, Sizes

Note = Callable[[str, Any], None]
"""Keeps a result by its name at once."""

GPU_SIZES = Sizes(
    heads=32, short=8192, long=32768, prefill_call=32768, batch=8, device="cuda", dtype=torch.bfloat16,
    copy_bytes=2**32, cached_tokens=64, rounds=10,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Sizes and times of everything."""

    sizes: Sizes = GPU_SIZES
    device: str = "cuda"
    lengths: tuple[int, ...] = (2048, 8192, 32768)
    batches: tuple[int, ...] = (1, 8)
    walks: tuple[str, ...] = ("chunks", "torch", "torch, graphed", "triton")
    """How the KVM operator takes its state through the chunks."""
    decode: tuple[int, int] = (2048, 32768)
    kernels: tuple[str, ...] = ("plain", "cuda", "flash_attn", "flash_attn_cute")
    matrix: int = 8192
    backend: str = "inductor"
    """Of torch.compile."""
    train: float = 20.0
    """Seconds of training steps, eager and compiled each."""
    recipes: tuple[str, ...] = ("paper/kvm_sqrt16_120m", "paper/gptalpha_120m", "paper/kvm_fixed256_120m")
    overrides: tuple[str, ...] = ()
    zero_steps: int = 5
    real: tuple[str, ...] = ("train.steps=400", "train.precision=bf16", "train.batch_size=16")
    """What is changed in the quickstart's recipe for a minute of real training."""
    end: float = 0.0
    """When the whole run should be over, by time.monotonic."""

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()


QUICK_PLAN = Plan(
    replace(QUICK, dtype=torch.bfloat16), "cpu", (128, 256), (1, 2), ("chunks", "torch"), (64, 256),
    ("plain", "cpu"), 64, "aot_eager", 0.1, ("paper/kvm_sqrt16_120m",),
    (
        "model.pattern=K2", "model.layers.F=null", "model.hidden_size=32", "model.vocab_size=64",
        "model.defaults.num_heads=2", "model.defaults.head_dim=16", "model.layers.K.chunk=16",
        "model.layers.K.rotary_dim=8", "model.layers.K.budget_minimum=16", "data.context=64",
        "train.batch_size=2", "train.micro_batch_size=2",
    ),
    1,
    (
        "train.steps=2", "model.hidden_size=64", "model.defaults.num_heads=1", "data.context=64",
        "data.vocab_size=320", f"data.sources.stdlib.paths=[{ROOT}/benchmarks/*.py]", "train.eval_tokens=200",
        "train.yardsticks=false", "schedule.warmup_steps=1", "train.threads=1",
    ),
)  # fmt: skip


def try_timing(note: Note, label: str, run: Run, plan: Plan) -> None:
    """Time a run, or note why it cannot be."""
    try:
        found: Any = alternate({"": run}, rounds=5, limit=3.0, device=plan.device)[""]
        print(f"{label}: {duration(found)}")
    except Exception as error:  # a kernel that is not installed, does not fit, or has no memory
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{label}: {found}")
    note(label, found)
