"""The numbers the KVM operator has to reach on a CPU, in fp32, with one sequence: python -m benchmarks.kvm

Ideal ratios are ratios of counted FLOPs (visible query-key pairs, matrix products only, routing once and
without a backward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybrid.layers import Site
from hybrid.layers.attention import AttentionMixer, BlockWindow, SlidingWindow
from hybrid.layers.softmax import attention, block_window_attention
from hybrid.model import HybridLM
from hybrid.recipe import layer_specs
from hybrid.recipe.schema import ModelSection, OptimizerSection
from hybrid.train.benchmark import TrainingStep, shares_table
from tests.parity.kvm_eager import eager_kvm

from .command import Row, begin, make_parser, output_file, run_sections
from .measure import Run, alternate, peak_bytes
from .plot import Curve, time_plot
from .workloads import (
    BUDGETS,
    QUICK,
    Sizes,
    copying,
    full_decoding,
    kvm_decoding,
    kvm_steps,
    operands,
    prefill,
)
from .workloads import training as training_run

GIB = 2**30


def training(sizes: Sizes) -> dict[str, Any]:
    """Forward and backward against torch's causal attention, at every length of the plot."""
    times: dict[int, dict[str, float]] = {}
    ideals: dict[int, dict[str, float]] = {}
    steps: dict[str, dict[str, float]] = {}
    for tokens in sizes.lengths:
        runs = {what: training_run(sizes, what, tokens) for what in ("full", *BUDGETS)}
        times[tokens] = alternate(runs, rounds=sizes.rounds)
        ideals[tokens] = {budget: sizes.ideal(budget, tokens) for budget in BUDGETS}
        if tokens in (sizes.short, sizes.long):
            steps |= {f"{sizes.name(b)}, {tokens} tokens": kvm_steps(runs[b]) for b in BUDGETS}
    targets = {("fixed", 0): 3.0, ("fixed", 1): 12.0, ("sqrt", 0): 1.3, ("sqrt", 1): 3.0}
    rows = []
    for (budget, which), target in targets.items():
        tokens = (sizes.short, sizes.long)[which]
        measured = times[tokens]["full"] / times[tokens][budget]
        name = f"{sizes.name(budget)}, {tokens} tokens"
        work = f"forward+backward, {name}"
        rows.append(Row(work, "torch full causal SDPA", measured, target, ideal=ideals[tokens][budget]))
        if not rows[-1].met or sizes is QUICK:
            print("\n" + shares_table(f"Steps of {work}", steps[name]))
    return {"rows": rows, "seconds": times, "ideal": ideals, "steps": steps}


def twin(sizes: Sizes) -> dict[str, Any]:
    """Forward and backward against the plain chunk-by-chunk form."""
    rows, times = [], {}
    for budget, target in (("fixed", 2.2), ("sqrt", 1.5)):
        shape = sizes, budget, sizes.short
        found = alternate(
            {"operator": training_run(*shape), "eager": training_run(*shape, eager_kvm)}, rounds=sizes.rounds
        )
        times[budget] = found
        work = f"forward+backward, {sizes.name(budget)}, {sizes.short} tokens"
        rows.append(Row(work, "chunk by chunk with autograd", found["eager"] / found["operator"], target))
    return {"rows": rows, "seconds": times}


def memory(sizes: Sizes) -> dict[str, Any]:
    """Peak resident memory of forward and backward above the inputs, each in a process of its own."""
    lengths = {"tokens": sizes.long, "small": 4 * sizes.chunk}
    peaks = {what: peak_bytes(training_run, sizes, what, **lengths) for what in ("full", *BUDGETS)}
    work = f"peak memory, forward+backward, {sizes.name('fixed')}, {sizes.long} tokens"
    ratio = peaks["fixed"] / max(1, peaks["full"])
    return {"rows": [Row(work, "torch full causal SDPA", ratio, 1.5, at_least=False)], "bytes": peaks}


def prefill_rate(sizes: Sizes) -> dict[str, Any]:
    """A long sequence through the state, against its own rate at a shorter one; weights count as inputs."""
    layer = sizes.kvm("sqrt")
    base, long = sizes.prefill_base, sizes.prefill
    times = alternate({str(n): prefill(sizes, "sqrt", n) for n in (base, long)}, rounds=3)
    rates = {n: layer.flops_per_token(n).forward * n / times[str(n)] for n in (base, long)}
    work = f"prefill of {long} tokens in calls of {sizes.prefill_call}, {sizes.name('sqrt')}, one layer"
    extra = peak_bytes(prefill, sizes, "sqrt", tokens=long, small=4 * sizes.chunk)
    rows = [
        Row(work, f"its FLOP/s at {base}", rates[long] / rates[base], 0.8, ideal=1),
        Row("the same", "extra memory", extra / GIB, 1.5, at_least=False, unit=" GiB"),
    ]
    return {"rows": rows, "seconds": times, "flops_per_second": rates, "extra_bytes": extra}


def decode(sizes: Sizes) -> dict[str, Any]:
    """One token: a long context against a short one, against a full cache, and against moving the state."""
    base, long = sizes.decode_base, sizes.decode
    shapes = {"fixed, short": ("fixed", base), "fixed": ("fixed", long), "sqrt": ("sqrt", long)}
    made = {name: kvm_decoding(sizes, *shape) for name, shape in shapes.items()}
    runs: dict[str, Run] = {name: run for name, (run, _) in made.items()}
    runs |= {"full": full_decoding(sizes, long), "copy": copying(sizes)}
    times = alternate(runs, rounds=sizes.rounds)
    bandwidth = 2 * sizes.copy_bytes / times.pop("copy")
    count = {"full": sizes.cached_tokens}
    per_token = {name: value / count.get(name, sizes.chunk) for name, value in times.items()}
    work, over = f"decode at {long}, {sizes.name('fixed')}", per_token["fixed"] / per_token["fixed, short"]
    rows, moved = [Row(work, f"itself at {base}", over, 1.1, at_least=False, ideal=1)], {}
    for budget, target in (("fixed", 10.0), ("sqrt", 5.0)):
        full, own = (
            layer.flops_at(long).forward - layer.flops_at(0).forward
            for layer in (sizes.layer("full"), sizes.layer(budget))
        )
        ratio = per_token["full"] / per_token[budget]
        work = f"decode at {long}, {sizes.name(budget)}"
        rows.append(Row(work, "full attention with a cache", ratio, target, ideal=full / own))
        moved[budget] = made[budget][1]().nbytes
        over = per_token[budget] / (moved[budget] / bandwidth)
        against = "its state's and window's bytes at copy bandwidth"
        rows.append(Row(work, against, over, 4.0, at_least=False, ideal=1))
    measured = {"seconds_per_token": per_token, "bytes": moved, "copy_bytes_per_second": bandwidth}
    return {"rows": rows, **measured}


def model(sizes: Sizes) -> dict[str, Any]:
    """Training steps of whole models, all KVM against all full attention."""
    runs, flops = {}, {}
    for name, letter in (("fixed", "K"), ("full", "F")):
        section = ModelSection(
            pattern=f"{letter}{sizes.layers}",
            hidden_size=sizes.hidden,
            vocab_size=sizes.vocabulary,
            defaults={"num_heads": sizes.heads, "head_dim": sizes.head_dim},
            layers={"K": {"kind": "kvm", **sizes.options("fixed")}} if letter == "K" else {},
        )
        torch.manual_seed(0)
        lm = HybridLM(section, layer_specs(section))
        flops[name] = lm.flops_per_token(sizes.model_tokens).training
        runs[name] = TrainingStep(lm, 1, sizes.model_tokens, OptimizerSection(lr=1e-3))
    times = alternate(runs, rounds=3)
    shape = f"{sizes.layers} layers x {sizes.hidden}, {sizes.model_tokens} tokens"
    ideal, measured = (x["full"] / x["fixed"] for x in (flops, times))
    row = Row(
        f"training step, {shape}, {sizes.name('fixed')}", "all full attention", measured, 1.0, ideal=ideal
    )
    return {"rows": [row], "seconds": times}


def windows(sizes: Sizes) -> dict[str, Any]:
    """Sliding and block sliding window: time per token must not grow with the length."""
    span = sizes.chunk * sizes.window_chunks
    heads = {"num_heads": sizes.heads, "head_dim": sizes.head_dim}
    chunks = {"chunk": sizes.chunk, "window_chunks": sizes.window_chunks}
    with torch.device("meta"):
        kinds: dict[str, tuple[AttentionMixer, Callable[..., Any]]] = {
            "sliding window": (
                SlidingWindow(SlidingWindow.Options(window=span, **heads), Site(sizes.hidden)),
                partial(attention, window=span),
            ),
            "block window": (
                BlockWindow(BlockWindow.Options(**chunks, **heads), Site(sizes.hidden)),
                partial(block_window_attention, **chunks),
            ),
        }
    rows, seconds = [], {}
    lengths = (sizes.window_short, sizes.window_long)
    for name, (layer, operator) in kinds.items():
        seconds[name] = alternate(
            {str(n): _window_training(sizes, n, operator) for n in lengths}, rounds=sizes.rounds
        )
        short, long = (seconds[name][str(n)] / n for n in lengths)
        pairs = [layer.visible_sum(n) / n for n in lengths]
        work = f"{name} of {span}, forward+backward, time per token at {lengths[1]}"
        against, ideal = f"itself at {lengths[0]}", pairs[1] / pairs[0]
        rows.append(Row(work, against, long / short, 1.2, at_least=False, ideal=ideal))
    return {"rows": rows, "seconds": seconds}


def _window_training(sizes: Sizes, tokens: int, operator: Callable[..., Any]) -> Run:
    leaves = operands(sizes, tokens).leaves()[:3]
    grad = torch.randn_like(leaves[0])
    return lambda: torch.autograd.grad(operator(*leaves)[0], leaves, grad)


SECTIONS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "training": training,
    "twin": twin,
    "memory": memory,
    "prefill": prefill_rate,
    "decode": decode,
    "model": model,
    "windows": windows,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and keep kvm.json and kvm.png in the output folder."""
    given = begin(make_parser(__doc__, SECTIONS), argv)
    sizes = QUICK if given.quick else Sizes()
    found = run_sections("kvm", SECTIONS, sizes, given)
    path = output_file(given, "kvm.png")
    if path and "training" in found:
        _plot(path, found["training"], sizes)


def _plot(path: Path, found: dict[str, Any], sizes: Sizes) -> None:
    seconds, ideal = found["seconds"], found["ideal"]
    lengths = list(seconds)
    full = [seconds[n]["full"] for n in lengths]
    curves = [Curve("full attention (torch SDPA)", lengths, full)]
    for budget in BUDGETS:
        name = f"KVM, {sizes.name(budget)}"
        curves.append(Curve(name, lengths, [seconds[n][budget] for n in lengths]))
        promised = [value / ideal[n][budget] for n, value in zip(lengths, full, strict=True)]
        curves.append(Curve(f"{name}, by counted FLOPs", lengths, promised, dashed=True))
    title = f"Forward + backward, 1 sequence, {sizes.heads} heads of {sizes.head_dim}, fp32, CPU"
    time_plot(path, title, "seconds", curves)


if __name__ == "__main__":
    main()
