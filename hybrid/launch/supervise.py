"""Supervision of a launcher: SIGTERM reaches the processes that train, and their exit code comes back.

DeepSpeed's launcher dies of SIGTERM and leaves behind what it started, which trains on; torchrun kills after
thirty seconds. So the processes that train get the signal, and not the launcher: they save and end, and it
with them. Imports nothing heavy, as it stays for the whole run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hybrid.errors import STOPPED_EXIT_CODE

LOOK_SECONDS = 0.5
"""Between looks for processes that have no signal yet."""


def run(argv: Sequence[str]) -> int:
    """Run a launcher to its end. Returns its code; 128 + N when signal N killed it."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to all processes itself
    process = subprocess.Popen(argv)
    signalled: set[int] = set()
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LOOK_SECONDS)
            break
        for pid in _ranks(process.pid) if asked else ():
            if pid not in signalled:
                signalled.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
    # One that had not come to catching the signal died of it; DeepSpeed's launcher reports that as -15.
    if asked and code in (-signal.SIGTERM, 256 - signal.SIGTERM):
        return STOPPED_EXIT_CODE
    return 128 - code if code < 0 else code


def _ranks(launcher: int) -> list[int]:
    """Find the processes below a launcher that it has given a rank."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # "PID (NAME) STATE PARENT ...", and a name may hold anything
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, left = [], [launcher]
    while left:
        pid = left.pop()
        with suppress(OSError):
            if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)  # what it has started itself inherits the variable
                continue
        left += children.get(pid, [])
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
