"""`hybrid bench kvm`: the numbers the KVM operator has to reach on a CPU, in fp32, with one sequence.

Ideal ratios are ratios of counted FLOPs (visible query-key pairs, matrix products only, routing once and
without a backward).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybrid.layers import Site
from hybrid.layers.attention import AttentionMixer, BlockWindow, SlidingWindow
from hybrid.layers.softmax import attention, block_window_attention

from .eager import eager_kvm
from .kvm_steps import kvm_steps
from .memory import peak_bytes
from .operands import BUDGETS, QUICK, Sizes, operator_flops
from .report import BenchError, Row, environment, keep, rows_table, shares_table
from .runs import Run, copying, full_decoding, full_training, kvm_decoding, kvm_training, prefill_run
from .timing import alternate

GIB = 2**30


class Found(NamedTuple):
    """What a section measured."""

    rows: list[Row]
    details: dict[str, Any]


def training(sizes: Sizes, quick: bool) -> Found:
    """Forward and backward against torch's causal attention, at every length of the plot."""
    times: dict[int, dict[str, float]] = {}
    ideals: dict[int, dict[str, float]] = {}
    steps: dict[str, dict[str, float]] = {}
    full = sizes.full()
    for tokens in sizes.lengths:
        runs: dict[str, Run] = {"full": full_training(sizes, tokens)}
        layers = {budget: sizes.kvm(budget) for budget in BUDGETS}
        runs |= {budget: kvm_training(sizes, budget, tokens) for budget in BUDGETS}
        times[tokens] = alternate(runs, rounds=sizes.rounds)
        cost = operator_flops(full, tokens).training
        ideals[tokens] = {b: cost / operator_flops(layer, tokens).training for b, layer in layers.items()}
        if tokens in (sizes.short, sizes.long):
            for budget in BUDGETS:
                steps[f"{sizes.name(budget)}, {tokens} tokens"] = kvm_steps(runs[budget])
    targets = {("fixed", 0): 3.0, ("fixed", 1): 12.0, ("sqrt", 0): 1.3, ("sqrt", 1): 3.0}
    rows = []
    for (budget, which), target in targets.items():
        tokens = (sizes.short, sizes.long)[which]
        measured = times[tokens]["full"] / times[tokens][budget]
        work = f"forward+backward, {sizes.name(budget)}, {tokens} tokens"
        rows.append(Row(work, "torch full causal SDPA", measured, target, ideal=ideals[tokens][budget]))
    return Found(rows, {"seconds": times, "ideal": ideals, "steps": steps})


def twin(sizes: Sizes, quick: bool) -> Found:
    """Forward and backward against the plain chunk-by-chunk form."""
    rows, times = [], {}
    for budget, target in (("fixed", 2.2), ("sqrt", 1.5)):
        shape = sizes, budget, sizes.short
        runs = {"operator": kvm_training(*shape), "eager": kvm_training(*shape, eager_kvm)}
        found = alternate(runs, rounds=sizes.rounds)
        times[budget] = found
        work = f"forward+backward, {sizes.name(budget)}, {sizes.short} tokens"
        rows.append(Row(work, "chunk by chunk with autograd", found["eager"] / found["operator"], target))
    return Found(rows, {"seconds": times})


def memory(sizes: Sizes, quick: bool) -> Found:
    """Peak resident memory of forward and backward above the inputs, each in a process of its own."""
    peaks = {what: peak_bytes("training", what, sizes.long, quick) for what in ("full", *BUDGETS)}
    work = f"peak memory, forward+backward, {sizes.name('fixed')}, {sizes.long} tokens"
    ratio = peaks["fixed"] / max(1, peaks["full"])
    return Found([Row(work, "torch full causal SDPA", ratio, 1.5, at_least=False)], {"bytes": peaks})


def prefill(sizes: Sizes, quick: bool) -> Found:
    """A long sequence through the state, against its own rate at a shorter one."""
    layer = sizes.kvm("sqrt")
    lengths = (sizes.prefill_base, sizes.prefill)
    times = alternate({str(n): prefill_run(sizes, "sqrt", n) for n in lengths}, rounds=3)
    rates = {n: layer.flops_per_token(n).forward * n / times[str(n)] for n in lengths}
    work = f"prefill of {sizes.prefill} tokens in pieces of {sizes.piece}, {sizes.name('sqrt')}, one layer"
    extra = peak_bytes("prefill", "sqrt", sizes.prefill, quick)
    rows = [
        Row(work, f"its FLOP/s at {sizes.prefill_base}", rates[lengths[1]] / rates[lengths[0]], 0.8, ideal=1),
        Row("the same", "extra memory", extra / GIB, 1.5, at_least=False, unit=" GiB"),
    ]
    return Found(rows, {"seconds": times, "flops_per_second": rates, "extra_bytes": extra})


def decode(sizes: Sizes, quick: bool) -> Found:
    """One token: a long context against a short one, against a full cache, and against moving the state."""
    base, long = sizes.decode_base, sizes.decode
    made = {
        "fixed, short": kvm_decoding(sizes, "fixed", base),
        "fixed": kvm_decoding(sizes, "fixed", long),
        "sqrt": kvm_decoding(sizes, "sqrt", long),
    }
    runs: dict[str, Run] = {name: run for name, (run, _) in made.items()}
    runs["full"] = full_decoding(sizes, long)
    runs["copy"] = copying(sizes)
    times = alternate(runs, rounds=sizes.rounds)
    bandwidth = 2 * sizes.copy_bytes / times.pop("copy")
    count = {"full": sizes.cached_tokens}
    per_token = {name: value / count.get(name, sizes.chunk) for name, value in times.items()}
    full = sizes.full().flops_at(long).forward - sizes.full().flops_at(0).forward
    rows = [
        Row(
            f"decode at {long}, {sizes.name('fixed')}",
            f"itself at {base}",
            per_token["fixed"] / per_token["fixed, short"],
            1.1,
            at_least=False,
            ideal=1,
        )
    ]
    moved = {}
    for budget, target in (("fixed", 10.0), ("sqrt", 5.0)):
        layer = sizes.kvm(budget)
        ideal = full / (layer.flops_at(long).forward - layer.flops_at(0).forward)
        ratio = per_token["full"] / per_token[budget]
        work = f"decode at {long}, {sizes.name(budget)}"
        rows.append(Row(work, "full attention with a cache", ratio, target, ideal=ideal))
        moved[budget] = made[budget][1]().nbytes
        over = per_token[budget] / (moved[budget] / bandwidth)
        against = "its state's and window's bytes at copy bandwidth"
        rows.append(Row(work, against, over, 4.0, at_least=False, ideal=1))
    details = {"seconds_per_token": per_token, "bytes": moved, "copy_bytes_per_second": bandwidth}
    return Found(rows, details)


def model(sizes: Sizes, quick: bool) -> Found:
    """Training steps of whole models, all KVM against all full attention."""
    from hybrid.model import HybridLM
    from hybrid.recipe.letters import layer_specs
    from hybrid.recipe.schema import ModelSection

    from .model import Trainer

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
        runs[name] = Trainer(lm, 1, sizes.model_tokens).step
    times = alternate(runs, rounds=3)
    shape = f"{sizes.layers} layers x {sizes.hidden}, {sizes.model_tokens} tokens"
    ideal, measured = (x["full"] / x["fixed"] for x in (flops, times))
    work = f"training step, {shape}, {sizes.name('fixed')}"
    row = Row(work, "all full attention", measured, 1.0, ideal=ideal)
    return Found([row], {"seconds": times})


def windows(sizes: Sizes, quick: bool) -> Found:
    """Sliding and block sliding window: time per token must not grow with the length."""
    span = sizes.chunk * sizes.window_chunks
    lengths = (sizes.window_short, sizes.window_long)

    def sliding(q, k, v):
        return attention(q, k, v, window=span)[0]

    def block(q, k, v):
        return block_window_attention(q, k, v, chunk=sizes.chunk, window_chunks=sizes.window_chunks)[0]

    with torch.device("meta"):
        heads = {"num_heads": sizes.heads, "head_dim": sizes.head_dim}
        own = {"chunk": sizes.chunk, "window_chunks": sizes.window_chunks}
        layers: dict[str, AttentionMixer] = {
            "sliding window": SlidingWindow(SlidingWindow.Options(window=span, **heads), Site(sizes.hidden)),
            "block window": BlockWindow(BlockWindow.Options(**own, **heads), Site(sizes.hidden)),
        }
    rows, seconds = [], {}
    for name, operator in (("sliding window", sliding), ("block window", block)):
        runs = {str(n): _window_training(sizes, n, operator) for n in lengths}
        times = alternate(runs, rounds=sizes.rounds)
        short, long = (times[str(n)] / n for n in lengths)
        pairs = [layers[name].visible_sum(n) / n for n in lengths]
        seconds[name] = times
        work = f"{name} of {span}, forward+backward, time per token at {lengths[1]}"
        against = f"itself at {lengths[0]}"
        rows.append(Row(work, against, long / short, 1.2, at_least=False, ideal=pairs[1] / pairs[0]))
    return Found(rows, {"seconds": seconds})


def _window_training(sizes: Sizes, tokens: int, operator: Callable[..., torch.Tensor]) -> Run:
    operands = sizes.operands(tokens)
    leaves = operands.leaves()[:3]
    grad = torch.randn_like(operands.q)
    return lambda: torch.autograd.grad(operator(*leaves), leaves, grad)


SECTIONS: dict[str, Callable[[Sizes, bool], Found]] = {
    "training": training,
    "twin": twin,
    "memory": memory,
    "prefill": prefill,
    "decode": decode,
    "model": model,
    "windows": windows,
}


def bench_kvm(output: str | None, only: list[str], quick: bool) -> int:
    """Measure, print, and keep `kvm.json` and `kvm.png` in `output`; 0 whether targets are met or not."""
    for name in only:
        if name not in SECTIONS:
            raise BenchError(f"bench kvm has no part '{name}'; its parts: {', '.join(SECTIONS)}")
    sizes = QUICK if quick else Sizes()
    rows: list[Row] = []
    for name in only or SECTIONS:
        print(f"{name} ...", flush=True)
        found = SECTIONS[name](sizes, quick)
        rows += found.rows
        print(rows_table(found.rows), flush=True)
        if output is not None:
            section = {"environment": environment(), "rows": found.rows, **found.details}
            keep(Path(output, "kvm.json"), {name: section})
        if name == "training":
            _missed(found, quick)
            if output is not None:
                _plot(Path(output, "kvm.png"), found.details, sizes)
    print(f"\n{rows_table(rows)}")
    if quick:
        print("\nThese are tiny sizes, to see that everything runs: the targets do not apply to them.")
    return 0


def _missed(found: Found, quick: bool) -> None:
    """The steps of what fell short."""
    missed = {row.work for row in found.rows if not row.met or quick}
    for name, seconds in found.details["steps"].items():
        if f"forward+backward, {name}" in missed:
            print("\n" + shares_table(f"Steps of forward+backward, {name}", seconds))


def _plot(path: Path, details: dict[str, Any], sizes: Sizes) -> None:
    from .plot import Curve, time_plot

    seconds, ideal = details["seconds"], details["ideal"]
    lengths = list(seconds)
    curves = [Curve("full attention (torch SDPA)", lengths, [seconds[n]["full"] for n in lengths])]
    for budget in BUDGETS:
        curves.append(Curve(f"KVM, {sizes.name(budget)}", lengths, [seconds[n][budget] for n in lengths]))
        promised = [seconds[n]["full"] / ideal[n][budget] for n in lengths]
        curves.append(Curve(f"KVM, {sizes.name(budget)}, by counted FLOPs", lengths, promised, dashed=True))
    title = f"Forward + backward, 1 sequence, {sizes.heads} heads of {sizes.head_dim}, fp32, CPU"
    time_plot(path, title, "seconds", curves)
