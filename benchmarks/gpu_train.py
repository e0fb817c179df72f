"""How fast whole recipes train on a GPU: by themselves, compiled, through the engine, and for real."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from dataclasses import replace
from typing import Any

import torch

from hybrid.model import HybridLM
from hybrid.recipe import load
from hybrid.recipe.schema import Recipe
from hybrid.train.benchmark import TrainingStep, parts, parts_table, seconds, step_parts
from hybrid.train.throughput import peak_flops

from .gpu_plan import Note, Plan


def train(plan: Plan, note: Note) -> None:
    """Training steps of whole recipes by part, eager."""
    for name in plan.recipes:
        if name not in plan.recipes[:2] and plan.left < 60:
            note(name, f"left out: {plan.left:.0f} s remained")
            continue
        recipe = load(name, plan.overrides)
        step = _training_step(recipe, plan)
        found = _steps(step, recipe, plan.train if name in plan.recipes[:2] else plan.train / 4, plan)
        _report(f"{name}, eager", found | {"parts": step_parts(step, _peak_flops(recipe, plan))}, note)
        del step


def compiled(plan: Plan, note: Note) -> None:
    """The same with every block under torch.compile (which leaves out the KVM operator), then every part by
    itself, to see which gains."""
    torch._dynamo.config.recompile_limit = 64  # blocks share their code
    for name in plan.recipes[:2]:
        if plan.left < 60:
            note(name, f"left out: {plan.left:.0f} s remained")
            continue
        recipe = load(name, plan.overrides)
        step = _training_step(recipe, plan)
        for block in step.model.blocks:
            block.compile(backend=plan.backend, dynamic=False)
        first = seconds(step, plan.device)
        found = {"first_step_seconds": first} | _steps(step, recipe, plan.train, plan)
        _report(f"{name}, compiled blocks", found, note)
        del step
        if plan.left > 60 and name == plan.recipes[0]:
            step = _training_step(recipe, plan)
            for _, part in parts(step.model):
                compiled_forward = torch.compile(part.forward, backend=plan.backend, dynamic=False)
                setattr(part, "forward", compiled_forward)  # noqa: B010 (mypy: part is a Module)
            _report(f"{name}, compiled parts", {"parts": step_parts(step, _peak_flops(recipe, plan))}, note)
            del step
        torch.compiler.reset()


def _training_step(recipe: Recipe, plan: Plan) -> TrainingStep:
    """Make ready for steps of the recipe's micro-batch, or of as many of its sequences as fit."""
    size = recipe.train.micro_batch_size or 1
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    while True:
        torch.manual_seed(0)
        with torch.device(plan.device):
            model = HybridLM.from_recipe(recipe).to(dtype)
        step = TrainingStep(model, size, recipe.data.context, recipe.optimizer)
        try:
            step()
            return step
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        del model, step
        torch.cuda.empty_cache()
        size //= 2


def _steps(step: TrainingStep, recipe: Recipe, budget: float, plan: Plan) -> dict[str, Any]:
    """Take steps for `budget` seconds; return their median, tokens per second, memory and the last loss."""
    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    while sum(times) < budget or len(times) < 3:
        times.append(seconds(step, plan.device))
    with torch.no_grad():
        loss = step.forward().item()
    typical = sorted(times)[len(times) // 2]
    rate = step.ids.numel() / typical
    flops = step.model.flops_per_token(step.ids.shape[1]).training * rate
    peak = _peak_flops(recipe, plan)
    return {
        "batch": step.ids.shape[0],
        "steps": len(times),
        "seconds": typical,
        "tokens_per_second": rate,
        "flops_per_second": flops,
        "utilisation": flops / peak if peak else None,
        "loss": loss if math.isfinite(loss) else str(loss),
        "peak_bytes": torch.cuda.max_memory_allocated() if plan.device == "cuda" else None,
    }


def _peak_flops(recipe: Recipe, plan: Plan) -> float | None:
    return peak_flops(recipe.monitor, torch.device(plan.device), recipe.train.precision)


def _report(label: str, found: dict[str, Any], note: Note) -> None:
    note(label, found)
    numbers = (
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
        if key != "parts"
    )
    print(f"{label}: " + ", ".join(numbers))
    if "parts" in found:
        print(parts_table(found["parts"]))


def zero(plan: Plan, note: Note) -> None:
    """ZeRO stages 1 to 3 in bf16 through the engine, in a process of its own; one device."""
    from .ranks import Ranks  # here, with all that a training run needs
    from .scale import open_engine, take_step

    for stage in (1, 2, 3):
        recipe = load(
            plan.recipes[0], [*plan.overrides, f"parallel.zero_stage={stage}", "train.precision=bf16"]
        )
        size = recipe.train.micro_batch_size or 1
        recipe = replace(recipe, train=replace(recipe.train, batch_size=size))
        with Ranks(1) as one:
            one.call(open_engine, recipe)
            one.call(take_step)  # not counted: it loads and compiles
            times = [one.call(take_step)[0][0] for _ in range(plan.zero_steps)]
        rate = size * recipe.data.context / sorted(times)[len(times) // 2]
        note(f"stage {stage}", {"seconds": times, "tokens_per_second": rate})
        print(f"ZeRO {stage}, bf16: {rate:,.0f} tokens/s")


def real(plan: Plan, note: Note) -> None:
    """Train the quickstart's model on text that is on every machine, with all that a run does."""
    from .ranks import Ranks

    with tempfile.TemporaryDirectory() as folder, Ranks(1) as one:
        own = [f"data.folder={folder}/data", f"train.output={folder}/run", "data.sources.bible=null"]
        recipe = load("quickstart", [*own, "monitor.tensorboard=false", *plan.real])
        (found,) = one.call(_train, recipe)
    note("run", found)
    print(", ".join(f"{name} {value:.5g}" for name, value in found.items()))


def _train(recipe: Recipe) -> dict[str, float]:
    from hybrid.train import train  # here, as it reads the environment of a rank

    with contextlib.redirect_stdout(io.StringIO()):
        summary = train(recipe)
    names = ("steps", "skipped", "bits_per_byte_before", "bits_per_byte", "tokens_per_second", "seconds")
    return {name: float(getattr(summary, name)) for name in names}
