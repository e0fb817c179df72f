"""`hybrid bench RECIPE`: the speed, utilisation and memory that a recipe's model reaches on this machine.

Measured on random tokens in one process: a training step of one micro-batch, prefill and decoding, by part.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybrid.files import write_json
from hybrid.model import HybridLM
from hybrid.model.block import Block
from hybrid.model.freeze import freeze_all_but
from hybrid.model.head import Loss
from hybrid.recipe import batch_geometry
from hybrid.recipe.schema import OptimizerSection, Recipe
from hybrid.text import columns, duration

from . import optimizer
from .throughput import memory_bytes, peak_flops

REST = "rest (embedding, norms, residual stream, loss)"


def benchmark(recipe: Recipe, output: str | None = None) -> None:
    """Measure on the GPU, where there is one, and print; with `output` also keep `output`/model.json."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = recipe.model.vocab_size or -(-recipe.data.vocab_size // 64) * 64
    recipe = replace(recipe, model=replace(recipe.model, vocab_size=vocabulary))
    torch.manual_seed(recipe.train.seed)
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    model = HybridLM.from_recipe(recipe).to(device, dtype)
    freeze_all_but(model, recipe.train.only)
    model.loss_chunk = recipe.train.loss_chunk
    model.activation_checkpointing = recipe.train.activation_checkpointing
    batch, tokens = batch_geometry(recipe, 1).micro_batch, recipe.data.context
    step = TrainingStep(model, batch, tokens, recipe.optimizer)
    peak = peak_flops(recipe.monitor, device, recipe.train.precision)
    step()  # starting up
    whole = median(seconds(step, device) for _ in range(3))
    training: dict[str, Any] = {"seconds": whole, "tokens_per_second": batch * tokens / whole}
    training |= {"parts": step_parts(step, peak), "peak_memory_bytes": memory_bytes(device)}
    results = {
        "environment": environment(device), "pattern": recipe.model.pattern,
        "precision": recipe.train.precision, "batch": batch, "tokens": tokens,
        "peak_flops_per_second": peak, "training": training, **serving(model, tokens),
    }  # fmt: skip
    print(_report(results))
    if output is not None:
        keep(Path(output, "model.json"), {recipe.model.pattern: results})


class TrainingStep:
    """A training step on random tokens, without DeepSpeed; bf16 parameters have fp32 masters."""

    def __init__(self, model: HybridLM, batch: int, tokens: int, section: OptimizerSection) -> None:
        """Draw `batch` sequences of `tokens` tokens for a model that has its device and dtype."""
        self.model = model
        self.ids = _random_ids(model, batch, tokens)
        self.labels = self.ids.roll(-1, 1)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = optimizer.build(section, zip(trained, self.masters, strict=True), model.no_decay())
        # Random tokens teach nothing, but weights left as initialised hold zeros, which some devices multiply
        # faster: train at a twentieth of the rate.
        optimizer.apply(self.optimizer.param_groups, section, 1.0, 0.05)

    def __call__(self) -> None:
        self.forward().backward()
        self.update()

    def forward(self) -> Tensor:
        """Compute the mean loss."""
        loss = cast(Loss, self.model(self.ids, labels=self.labels))
        return loss.total / loss.tokens

    def update(self) -> None:
        """Let the optimizer use the gradients, and drop them."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        if self.parameters[0].dtype != torch.float32:  # else masters and parameters share their memory
            with torch.no_grad():
                torch._foreach_copy_([*self.parameters], [*self.masters])
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)


def parts(model: HybridLM) -> Iterator[tuple[str, nn.Module]]:
    """Name the parts that are timed: the head, every block's mixer by its kind, and feed-forward."""
    yield "head", model.head
    for block in cast(list[Block], list(model.blocks)):
        yield f"mixer {block.mixer.kind}", block.mixer
        yield "feed-forward", block.ffn


def seconds(run: Callable[[], Any], device: torch.device | str = "cpu") -> float:
    """Time one run, a GPU's work included."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def seconds_by_part(model: HybridLM, run: Callable[[], Any]) -> dict[str, float]:
    """Time one run of a model by part, with hooks; what remains of its time is REST.

    On a GPU a part's start and end are events in its stream, so that nothing waits for them.
    """
    device = model.head.weight.device
    cuda = device.type == "cuda"
    starts: dict[str, Any] = {}
    spans: list[tuple[str, Any, Any]] = []

    def now() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(label: str, *_: object) -> None:
        starts[label] = now()  # may replace one without an end: a checkpointed block's second run stops early

    def end(label: str, *_: object) -> None:
        spans.append((label, starts.pop(label), now()))

    with ExitStack() as hooks:
        for label, module in parts(model):
            begins, ends = partial(start, label), partial(end, label)
            hooks.enter_context(module.register_forward_pre_hook(begins))
            hooks.enter_context(module.register_forward_hook(ends))
            hooks.enter_context(module.register_full_backward_pre_hook(begins))
            hooks.enter_context(module.register_full_backward_hook(ends))
        whole = seconds(run, device)
    found: dict[str, float] = defaultdict(float)
    for label, first, last in spans:
        found[label] += first.elapsed_time(last) / 1e3 if cuda else last - first
    return {**found, REST: max(0.0, whole - sum(found.values()))}


def step_parts(step: TrainingStep, peak: float | None) -> list[dict[str, Any]]:
    """Time a training step by part, forward and backward together, and the optimizer; medians of three.

    Returns an entry for each part, the slowest first, and for the whole step: its seconds and share of the
    step, and of parts whose FLOPs are counted the FLOP/s and their share of `peak`, where that is known.
    """
    rounds = []
    for _ in range(4):
        by_part = seconds_by_part(step.model, lambda: step.forward().backward())
        rounds.append({**by_part, "optimizer": seconds(step.update, step.ids.device)})
    medians = {label: median(one[label] for one in rounds[1:]) for label in rounds[-1]}
    flops = _training_flops(step.model, step.ids.shape[1])
    whole = sum(medians.values())
    entries = []
    for label, value in [*sorted(medians.items(), key=lambda item: -item[1]), ("step", whole)]:
        entry: dict[str, Any] = {"part": label, "seconds": value, "share": value / whole}
        if label in flops:
            rate = flops[label] * step.ids.numel() / value
            entry |= {"flops_per_second": rate, "utilisation": rate / peak if peak else None}
        entries.append(entry)
    return entries


def _training_flops(model: HybridLM, tokens: int) -> dict[str, float]:
    """Count FLOPs per token of a forward and backward pass over `tokens` tokens, by part."""
    flops: dict[str, float] = defaultdict(float, head=3 * 2.0 * model.section.hidden_size * model.vocab_size)
    for block in cast(list[Block], list(model.blocks)):
        flops[f"mixer {block.mixer.kind}"] += block.mixer.flops_per_token(tokens).training
        flops["feed-forward"] += block.ffn.flops().training
    return {**flops, "step": sum(flops.values())}


@torch.no_grad()
def serving(model: HybridLM, tokens: int, decoded: int = 32) -> dict[str, Any]:
    """Time prefill of `tokens` tokens in calls of up to 1024, then decoding, by part; one sequence."""
    ids, found = _random_ids(model, 1, tokens), {}
    _, state = model(ids[:, :1024])  # starting up
    model(ids[:, :1], state)
    state = None

    def read(calls: Sequence[Tensor]) -> None:
        nonlocal state
        for call in calls:
            _, state = model(call, state)

    for phase, calls in (("prefill", ids.split(1024, 1)), ("decode", [ids[:, :1]] * decoded)):
        by_part = seconds_by_part(model, partial(read, calls))
        count = sum(call.numel() for call in calls)
        found[phase] = {"tokens": count, "seconds": sum(by_part.values()), "parts": by_part}
    return found


def _random_ids(model: HybridLM, batch: int, tokens: int) -> Tensor:
    drawn = torch.randint(model.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    return drawn.to(model.head.weight.device)


def _report(results: dict[str, Any]) -> str:
    training = results["training"]
    lines = [
        f"Training step of {results['batch']} x {results['tokens']} tokens, {results['precision']}: "
        f"{duration(training['seconds'])}, {training['tokens_per_second']:.4g} tokens/s, "
        f"peak memory {training['peak_memory_bytes'] / 2**30:.2f} GiB",
        parts_table(training["parts"]),
    ]
    for phase in ("prefill", "decode"):
        found = results[phase]
        rate = found["tokens"] / found["seconds"]
        title = f"{phase.capitalize()} of {found['tokens']} tokens, one sequence ({rate:.4g} tokens/s)"
        lines.append(shares_table(title, found["parts"]))
    return "\n\n".join(lines)


def parts_table(entries: list[dict[str, Any]]) -> str:
    """Format the entries of `step_parts`."""
    rows = [["part", "time", "share", "TFLOP/s", "of peak"]]
    for entry in entries:
        rate, used = entry.get("flops_per_second"), entry.get("utilisation")
        cells = ("-" if rate is None else f"{rate / 1e12:.3g}", "-" if used is None else f"{used:.1%}")
        rows.append([entry["part"], duration(entry["seconds"]), f"{entry['share']:.1%}", *cells])
    return columns(rows, left={0})


def shares_table(title: str, by_part: dict[str, float]) -> str:
    """Format where time went, the largest part first."""
    total = sum(by_part.values())
    ordered = sorted(by_part.items(), key=lambda item: -item[1])
    rows = [[name, duration(value), f"{value / total:.0%}"] for name, value in ordered]
    return f"{title}: {duration(total)}\n" + columns(rows, left={0}, indent="  ")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Describe what the numbers depend on beside the code."""
    cpu = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", cpu.read_text() if cpu.exists() else "", re.M)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": models[0] if models else platform.processor(),
    }
    if torch.device(device).type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def keep(path: Path, results: dict[str, Any]) -> None:
    """Write JSON, adding to what the file holds under other names."""
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**held, **results})
