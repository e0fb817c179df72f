"""How fast the KVM operator and torch's attention are on a GPU, and of how many launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybrid.layers.kvm.parallel import force_walk
from hybrid.layers.softmax import force_kernel
from hybrid.text import columns, duration
from hybrid.train.benchmark import shares_table

from .command import Row, rows_table
from .gpu_plan import Note, Plan, try_timing
from .measure import Run, alternate
from .workloads import BUDGETS, Sizes, copying, forward, full_decoding, kvm_decoding, kvm_steps, training


def ceilings(plan: Plan, note: Note) -> None:
    """What the device moves and multiplies at best, on random data."""
    a, b = torch.randn(2, plan.matrix, plan.matrix, device=plan.device).to(torch.bfloat16)
    runs = {"copy": copying(plan.sizes), "product": lambda: a @ b}
    times = alternate(runs, rounds=10, device=plan.device)
    note("copy_bytes_per_second", 2 * plan.sizes.copy_bytes / times["copy"])
    note("bf16_flops_per_second", 2 * plan.matrix**3 / times["product"])


def operator(plan: Plan, note: Note) -> None:
    """Forward and backward against torch's flash attention, at every length and batch, by every walk."""
    cells = [["tokens", "batch", "", "forward", "both", "launches", "against flash", "ideal", "memory"]]
    rows: list[Row] = []
    for tokens in plan.lengths:
        for batch in plan.batches:
            sizes = replace(plan.sizes, batch=batch)
            try:
                found = _operator_at(plan, sizes, tokens)
            except torch.OutOfMemoryError as error:
                note(f"{tokens} x {batch}", f"out of memory: {error}")
                continue
            note(f"{tokens} x {batch}", found)
            cells += [[str(tokens), str(batch), *_cells(name, one)] for name, one in found.items()]
            rows += _rows(sizes, tokens, found) if batch == plan.batches[-1] else []
    note("rows", rows)
    print(columns(cells, left={2}) + "\n" + rows_table(rows))


def _rows(sizes: Sizes, tokens: int, found: dict[str, dict[str, Any]]) -> list[Row]:
    """Compare the best walk with the numbers to reach."""
    targets = {("fixed", sizes.short): 1.5, ("fixed", sizes.long): 6.0, ("sqrt", sizes.long): 3.0}
    rows = []
    for budget in BUDGETS:
        target = targets.get((budget, tokens))
        if target is not None:
            best = max(one["ratio"] for name, one in found.items() if name.startswith(budget))
            work = f"forward+backward, {sizes.name(budget)}, {tokens} tokens"
            rows.append(Row(work, "torch flash SDPA", best, target, ideal=sizes.ideal(budget, tokens)))
    return rows


def _operator_at(plan: Plan, sizes: Sizes, tokens: int) -> dict[str, dict[str, Any]]:
    runs = {"full": training(sizes, "full", tokens)}
    forwards = {"full": forward(sizes, "full", tokens)}
    for budget in BUDGETS:
        for walk in plan.walks:
            label = f"{budget}, {walk}"
            runs[label] = _walked(training(sizes, budget, tokens), walk)
            if "graphed" in walk:
                runs[label] = _graphed(runs[label])
            else:
                forwards[label] = _walked(forward(sizes, budget, tokens), walk)
    found: dict[str, dict[str, Any]] = {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        turns = {f"{label}, forward": run for label, run in forwards.items()} | runs
        times = alternate(turns, rounds=sizes.rounds, limit=5.0, device=plan.device)
        for label, run in runs.items():
            found[label] = {
                "forward": times.get(f"{label}, forward"),
                "both": times[label],
                "launches": _launches(run, plan),
                "peak_bytes": _peak_bytes(run, plan),
                "ratio": times["full"] / times[label],
                "ideal": sizes.ideal(label.partition(",")[0], tokens),
            }
    return found


def _walked(run: Run, walk: str) -> Run:
    """Make the KVM operator take this walk in a run."""

    def walked() -> None:
        with force_walk(walk.partition(",")[0]):
            run()

    return walked


def _graphed(run: Run) -> Run:
    """Capture a run in a CUDA graph, and give its replay: what is left without the host."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _launches(run: Run, plan: Plan) -> int | None:
    """Count the kernels that one run launches; None on a CPU."""
    if plan.device != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages())


def _cells(name: str, one: dict[str, Any]) -> list[str]:
    times = ["-" if one[key] is None else duration(one[key]) for key in ("forward", "both")]
    ratios = (f"{one['ratio']:.2f}x", f"{one['ideal']:.2f}x")
    launches = "-" if one["launches"] is None else str(one["launches"])
    return [name, *times, launches, *ratios, f"{one['peak_bytes'] / 2**30:.2f} GiB"]


def _peak_bytes(run: Run, plan: Plan) -> int:
    """Measure device memory above what is there already; 0 on a CPU."""
    if plan.device != "cuda":
        return 0
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - base


def variants(plan: Plan, note: Note) -> None:
    """The operator with each attention kernel, and torch's attention by its other backends."""
    sizes, tokens = plan.sizes, plan.sizes.short
    for name in plan.kernels:
        for budget in BUDGETS:
            with force_kernel(name):
                label = f"{sizes.name(budget)}, kernel {name}"
                try_timing(note, label, training(sizes, budget, tokens), plan)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            try_timing(note, f"full, {backend.name}", training(sizes, "full", tokens), plan)


def steps(plan: Plan, note: Note) -> None:
    """Where the operator's time goes."""
    for tokens in (plan.sizes.short, plan.sizes.long):
        for budget in BUDGETS:
            label = f"{plan.sizes.name(budget)}, {tokens} tokens"
            found = kvm_steps(training(plan.sizes, budget, tokens), plan.device)
            note(label, found)
            print(shares_table(f"Steps of forward+backward, {label}", found))


def decode(plan: Plan, note: Note) -> None:
    """One token at a short and at a long context, against a full cache."""
    sizes = plan.sizes
    for position in plan.decode:
        made = {budget: kvm_decoding(sizes, budget, position) for budget in BUDGETS}
        runs: dict[str, Run] = {budget: run for budget, (run, _) in made.items()}
        runs["full"] = full_decoding(sizes, position)
        times = alternate(runs, rounds=3, limit=10.0, device=plan.device)
        for name, value in times.items():
            count = sizes.cached_tokens if name == "full" else sizes.chunk
            found = {"seconds": value / count}
            if name in made:
                found["state_bytes"] = made[name][1]().nbytes
            note(f"{name} at {position}", found)
            print(f"decode, {name} at {position}: {duration(value / count)} for {sizes.batch} sequences")
