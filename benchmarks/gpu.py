"""What one GPU does with this project, in one command, within a quarter of an hour, without a network:

    python -m benchmarks.gpu --output OUT

In an order that gives most first: whether the GPU computes what the CPU does (stored vectors, every kind of
layer in fp32 and bf16, every attention kernel); the KVM operator in bf16 against torch's flash attention,
with its launches; decoding; the 120M recipes on random tokens; ZeRO through the real engine; a minute of real
training; then where time goes, other kernels, and torch.compile. `OUT/gpu.json` is written after every
number; a section that fails leaves its error there, and the others go on. It ends with a table of what to
change.

What to carry to a machine where nothing can be installed: this checkout (hybrid/, layers/, recipes/,
benchmarks/, tests/vectors/), and beside torch (2.9 or newer, with its triton) the packages numpy, pyyaml,
safetensors and omegaconf. The last is pure Python: where it is missing, carry its folder and name the folder
it lies in, `PYTHONPATH=CARRIED python -m benchmarks.gpu`. The project itself need not be installed; only the
sections zero and real take what a training run takes.
`--quick` does the same at tiny sizes on a CPU.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybrid.train.benchmark import environment

from . import ROOT
from .command import begin, keep_section, make_parser, output_file
from .gpu_advice import advice_table
from .gpu_correct import agree, attention, verify
from .gpu_operator import ceilings, decode, operator, steps, variants
from .gpu_plan import QUICK_PLAN, Note, Plan
from .gpu_train import compiled, real, train, zero

SECTIONS: dict[str, tuple[Callable[[Plan, Note], None], float]] = {
    "verify": (verify, 20),
    "agree": (agree, 30),
    "attention": (attention, 5),
    "operator": (operator, 60),
    "decode": (decode, 20),
    "train": (train, 60),
    "zero": (zero, 60),
    "real": (real, 60),
    "ceilings": (ceilings, 5),
    "steps": (steps, 10),
    "variants": (variants, 20),
    "compiled": (compiled, 90),
}
"""Name -> what it does, and the seconds below which it is not begun."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when every section ran, or when there is no GPU to run them."""
    parser = make_parser(__doc__, SECTIONS)
    parser.add_argument("--seconds", type=float, default=780.0, help="begin no section that would go beyond")
    parser.set_defaults(output=ROOT / "benchmarks" / "results")
    given = begin(parser, argv)
    if not given.quick and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--quick runs tiny sizes on the CPU)")
        return 0
    begun, path = time.monotonic(), output_file(given, "gpu.json")
    assert path is not None
    plan = replace(QUICK_PLAN if given.quick else Plan(), end=begun + given.seconds)
    failed = [name for name in given.only or SECTIONS if not _guarded(name, plan, path)]
    print(f"\n{advice_table(json.loads(path.read_text(encoding='utf-8')))}")
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
