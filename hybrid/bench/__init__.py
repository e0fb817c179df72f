"""Measurements: `hybrid bench kvm`, `mixers`, `scale`, and `hybrid bench model RECIPE`."""

from __future__ import annotations

import os
from collections.abc import Sequence


def run(
    what: str,
    arguments: Sequence[str] = (),
    *,
    quick: bool = False,
    output: str | None = None,
    only: Sequence[str] = (),
    threads: int | None = None,
) -> int:
    """One benchmark by all cores (or `threads`), from the command line's arguments; returns the exit code."""
    if output and what in ("kvm", "mixers"):
        from .plot import require_matplotlib

        require_matplotlib()  # before minutes of measuring
    import torch

    torch.set_num_threads(threads or _cores())
    if what == "kvm":
        from .kvm import bench_kvm

        return bench_kvm(output, list(only), quick)
    if what == "mixers":
        from .mixers import bench_mixers

        return bench_mixers(output, list(only), quick)
    if what == "scale":
        from .scale import bench_scale

        return bench_scale(output, list(only), quick)
    from hybrid.recipe import load

    from .model import bench_model

    return bench_model(load(arguments[0], arguments[1:]), output)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
