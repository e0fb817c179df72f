"""Programs that tests start and watch."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hybrid.distributed.environment import LAUNCHER_VARIABLES

SECONDS = 300  # a loaded machine takes minutes to start two processes


@contextlib.contextmanager
def started(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own, which ends with the block; `log` gets what it says."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env=environment | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_steps(process: subprocess.Popen, output: Path, count: int, log: Path) -> None:
    """Until a run has logged `count` lines."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if (output / "metrics.jsonl").read_text().count("\n") >= count:
                return
        time.sleep(0.01)
    raise AssertionError(f"no {count} steps in time:\n{log.read_text()}")


def wait_until_it_catches_sigterm(pid: int, seconds: float = SECONDS) -> None:
    """From then on the signal does not simply end the process."""
    status, end = Path(f"/proc/{pid}/status"), time.monotonic() + seconds
    while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> signal.SIGTERM - 1 & 1:
        assert time.monotonic() < end
        time.sleep(0.005)
