"""What one GPU does with this project, in one command, within six minutes, without a network:

    python -m benchmarks.gpu --output OUT

It compares the GPU's results with the stored vectors (fp32, and bf16 with wider tolerances), times the KVM
operator in bf16 against torch's flash attention (forward, backward, decoding, every attention kernel there
is, and by step), and trains the 120M recipes on random tokens, eager and compiled. `OUT/gpu.json` is written
after every number; a section that fails leaves its error there, and the others go on.

What to carry to a machine where nothing can be installed: this checkout (hybrid/, layers/, recipes/,
benchmarks/, tests/vectors/), and beside torch (2.9 or newer, with its triton) the packages numpy, pyyaml,
safetensors and omegaconf. The last is pure Python: where it is missing, carry its folder and name the folder
it lies in, `PYTHONPATH=CARRIED python -m benchmarks.gpu`. The project itself need not be installed.
`--quick` does the same at tiny sizes on a CPU.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybrid.layers.softmax import force_kernel
from hybrid.model import HybridLM
from hybrid.recipe import load
from hybrid.recipe.schema import Recipe
from hybrid.text import columns, duration
from hybrid.train.benchmark import (
    TrainingStep,
    environment,
    parts,
    parts_table,
    seconds,
    shares_table,
    step_parts,
)
from hybrid.train.throughput import peak_flops
from hybrid.verify import Setting, check_folder, table

from . import ROOT
from .command import Row, begin, keep_section, make_parser, output_file, rows_table
from .measure import Run, alternate
from .workloads import (
    BUDGETS,
    QUICK,
    Sizes,
    copying,
    forward,
    full_decoding,
    kvm_decoding,
    kvm_steps,
    training,
)

Note = Callable[[str, Any], None]


GPU_SIZES = Sizes(
    heads=32, short=8192, long=32768, prefill_call=32768, batch=8, device="cuda", dtype=torch.bfloat16,
    copy_bytes=2**32, cached_tokens=64, rounds=10,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Sizes and times of everything."""

    sizes: Sizes = GPU_SIZES
    device: str = "cuda"
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    decode: tuple[int, int] = (2048, 32768)
    kernels: tuple[str, ...] = ("plain", "cuda", "flash_attn", "flash_attn_cute")
    matrix: int = 8192
    backend: str = "inductor"
    """Of torch.compile."""
    train: float = 25.0
    """Seconds of training steps, eager and compiled each."""
    recipes: tuple[str, ...] = ("paper/kvm_fixed256_120m", "paper/gptalpha_120m", "paper/kvm_sqrt16_120m")
    overrides: tuple[str, ...] = ()
    end: float = 0.0
    """When the whole run should be over, by time.monotonic."""

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()


QUICK_PLAN = Plan(
    replace(QUICK, batch=2, dtype=torch.bfloat16), "cpu", (64, 128, 256), (64, 256), ("plain", "cpu"), 64,
    "aot_eager", 0.1, ("paper/kvm_fixed256_120m",),
    (
        "model.pattern=K2", "model.layers.F=null", "model.hidden_size=32", "model.vocab_size=64",
        "model.defaults.num_heads=2", "model.defaults.head_dim=16", "model.layers.K.chunk=16",
        "model.layers.K.rotary_dim=8", "model.layers.K.budget_minimum=16", "data.context=64",
        "train.batch_size=2", "train.micro_batch_size=2",
    ),
)  # fmt: skip


# Sections: each measures, and notes results by name as they come


def ceilings(plan: Plan, note: Note) -> None:
    """What the device moves and multiplies at best, on random data."""
    a, b = torch.randn(2, plan.matrix, plan.matrix, device=plan.device).to(torch.bfloat16)
    runs = {"copy": copying(plan.sizes), "product": lambda: a @ b}
    times = alternate(runs, rounds=10, device=plan.device)
    note("copy_bytes_per_second", 2 * plan.sizes.copy_bytes / times["copy"])
    note("bf16_flops_per_second", 2 * plan.matrix**3 / times["product"])


def verify(plan: Plan, note: Note) -> None:
    """The stored vectors."""
    for precision in ("fp32", "bf16"):
        results = check_folder(ROOT / "tests" / "vectors", Setting(plan.device, precision))
        print(f"{precision}\n{table(results)}")
        found = {r.name: {"status": r.status, "errors": r.errors, "reason": r.reason} for r in results}
        note(precision, found)


def operator(plan: Plan, note: Note) -> None:
    """Forward and backward against torch's flash attention, at every length."""
    sizes, rows = plan.sizes, []
    targets = {("fixed", sizes.short): 1.5, ("fixed", sizes.long): 6.0, ("sqrt", sizes.long): 3.0}
    cells = [["tokens", "", "forward", "backward", "both", "against flash", "ideal", "memory"]]
    for tokens in plan.lengths:
        try:
            found = _operator_at(plan, tokens)
        except torch.OutOfMemoryError as error:
            note(str(tokens), f"out of memory: {error}")
            continue
        note(str(tokens), found)
        cells += [_cells(tokens, name, one) for name, one in found.items()]
        for name, one in found.items():
            if (target := targets.get((name, tokens))) is not None:
                work = f"forward+backward, {sizes.name(name)}, {tokens} tokens"
                rows.append(Row(work, "torch flash SDPA", one["ratio"], target, ideal=one["ideal"]))
    note("rows", rows)
    print(columns(cells, left={1}) + "\n" + rows_table(rows))


def _operator_at(plan: Plan, tokens: int) -> dict[str, dict[str, float]]:
    sizes, found = plan.sizes, {}
    both = {what: training(sizes, what, tokens) for what in ("full", *BUDGETS)}
    turns = {f"{what}, forward": forward(sizes, what, tokens) for what in both} | both
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        times = alternate(turns, rounds=sizes.rounds, limit=6.0, device=plan.device)
        for what, run in both.items():
            found[what] = {
                "forward": times[f"{what}, forward"],
                "both": times[what],
                "peak_bytes": _peak_bytes(run, plan),
                "ratio": times["full"] / times[what],
                "ideal": sizes.ideal(what, tokens),
            }
    return found


def _cells(tokens: int, name: str, one: dict[str, float]) -> list[str]:
    times = (one["forward"], one["both"] - one["forward"], one["both"])
    ratios = (f"{one['ratio']:.2f}x", f"{one['ideal']:.2f}x")
    return [str(tokens), name, *map(duration, times), *ratios, f"{one['peak_bytes'] / 2**30:.2f} GiB"]


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
                _try_timing(note, label, training(sizes, budget, tokens), plan)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel(backend):
            _try_timing(note, f"full, {backend.name}", training(sizes, "full", tokens), plan)


def _try_timing(note: Note, label: str, run: Run, plan: Plan) -> None:
    try:
        found: Any = alternate({"": run}, rounds=5, limit=3.0, device=plan.device)[""]
        print(f"{label}: {duration(found)}")
    except Exception as error:  # a kernel that is not installed, does not fit, or has no memory
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{label}: {found}")
    note(label, found)


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


def train(plan: Plan, note: Note) -> None:
    """Training steps of whole recipes by part, eager."""
    for name in plan.recipes:
        if name != plan.recipes[0] and plan.left < 60:
            note(name, f"left out: {plan.left:.0f} s remained")
            continue
        recipe = load(name, plan.overrides)
        step = _training_step(recipe, plan)
        found = _steps(step, recipe, plan.train if name == plan.recipes[0] else plan.train / 4, plan)
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


SECTIONS: dict[str, tuple[Callable[[Plan, Note], None], float]] = {
    "ceilings": (ceilings, 5),
    "verify": (verify, 20),
    "operator": (operator, 60),
    "decode": (decode, 20),
    "steps": (steps, 10),
    "variants": (variants, 20),
    "train": (train, 60),
    "compiled": (compiled, 90),
}
"""Name -> what it does, and the seconds below which it is not begun."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when every section ran, or when there is no GPU to run them."""
    parser = make_parser(__doc__, SECTIONS)
    parser.add_argument("--seconds", type=float, default=330.0, help="begin no section that would go beyond")
    parser.set_defaults(output=ROOT / "benchmarks" / "results")
    given = begin(parser, argv)
    if not given.quick and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--quick runs tiny sizes on the CPU)")
        return 0
    begun, path = time.monotonic(), output_file(given, "gpu.json")
    assert path is not None
    plan = replace(QUICK_PLAN if given.quick else Plan(), end=begun + given.seconds)
    failed = [name for name in given.only or SECTIONS if not _guarded(name, plan, path)]
    took = time.monotonic() - begun
    print(f"\n{path} after {took:.0f} s" + (f"; failed: {failed}" if failed else ""))
    return 1 if failed else 0


def _guarded(name: str, plan: Plan, path: Path) -> bool:
    """Run one section; its results, or its error, are in the file whatever happens."""
    section, needed = SECTIONS[name]
    found: dict[str, Any] = {"environment": environment(plan.device)}

    def note(key: str, value: Any) -> None:
        found[key] = value
        keep_section(path, name, found)

    print(f"\n== {name} ({plan.left:.0f} s left)", flush=True)
    if plan.left < needed:
        note("error", f"left out: it needs {needed} s and {plan.left:.0f} s remained")
        return False
    start = time.monotonic()
    try:
        section(plan, note)
    except Exception as error:  # the other sections still count
        traceback.print_exc()
        note("error", f"{type(error).__name__}: {error}")
    note("section_seconds", time.monotonic() - start)
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    return "error" not in found


if __name__ == "__main__":
    sys.exit(main())
