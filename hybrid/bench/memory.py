"""Peak memory of one piece of work on a CPU, in a process of its own.

What counts is the process's resident memory, as that is what a user runs out of: the allocator's view would
leave out what operators take for themselves. Baseline: resident memory with the inputs there, after the same
work at a small size has loaded the libraries; peak: the kernel's high-water mark, reset at the baseline.
Output and gradients count.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .operands import QUICK, Sizes
from .runs import Run, full_training, kvm_training, prefill_run
from .timing import seconds


def peak_bytes(work: str, what: str, tokens: int, quick: bool) -> int:
    """Bytes above the inputs that `work` on `what` (`full`, or a budget) needs at most.

    `training` is forward and backward of the operator; `prefill` reads a sequence in pieces with one layer,
    whose weights count as inputs.
    """
    command = [sys.executable, "-P", "-m", "hybrid.bench.memory", work, what, str(tokens), str(int(quick))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(make: Callable[[int], Run], tokens: int, small: int) -> int:
    """Of `make(tokens)`, in this process."""
    make(small)()
    return measure_once(make(tokens))[1]


def measure_once(run: Run) -> tuple[float, int]:
    """Seconds of a run, and bytes at its peak above what this process held before."""
    base = _reset()
    taken = seconds(run)
    return taken, max(0, _peak() - base)


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _reset() -> int:
    """Resident memory now; where the system allows it the high-water mark starts again from there."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS") or _peak()


def _peak() -> int:
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(arguments: list[str]) -> None:
    work, what, tokens, quick = arguments
    sizes = QUICK if quick == "1" else Sizes()

    def make(tokens: int) -> Run:
        if work == "prefill":
            return prefill_run(sizes, what, tokens)
        return full_training(sizes, tokens) if what == "full" else kvm_training(sizes, what, tokens)

    print(json.dumps(measure(make, int(tokens), 4 * sizes.chunk)))


if __name__ == "__main__":
    main(sys.argv[1:])
