"""Ranks as processes of their own that can be killed, started in a moment: forked from a server that has
imported everything already."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from hybrid.distributed.environment import free_port

from ...processes import wait_until_it_catches_sigterm
from . import tiny

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["pytest", "hybrid.train.trainer", "deepspeed.runtime.zero.muon.muon_optimizer", "grain", __name__]
)


class Ranks:
    """The processes of one run."""

    def __init__(
        self, arguments: list[str], size: int, log: Path, function: Callable[[list[str]], int]
    ) -> None:
        self.log = log
        port = free_port()
        self.processes = []
        for rank in range(size):
            environment = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            }  # fmt: skip
            process = _forks.Process(
                target=_run, args=(function, arguments, environment, str(log)), daemon=True
            )
            process.start()
            self.processes.append(process)

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def wait_for_steps(self, output: Path, count: int, seconds: float = 180) -> bool:
        """Until the run has logged `count` steps; whether it has, before a process ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(process.is_alive() for process in self.processes):
            with contextlib.suppress(OSError):
                if tiny.logged_steps(output) >= count:
                    return True
            time.sleep(0.005)
        return False

    def wait_until_they_catch_sigterm(self) -> None:
        for process in self.processes:
            assert process.pid is not None
            wait_until_it_catches_sigterm(process.pid)

    def exit_codes(self, seconds: float, ranks: list[int] | None = None) -> list[int | None]:
        """Of the processes, or of some, when they have ended; AssertionError when they do not in time."""
        chosen = [self.processes[rank] for rank in ranks or range(len(self.processes))]
        end = time.monotonic() + seconds
        for process in chosen:
            wait([process.sentinel], max(0.0, end - time.monotonic()))
            if process.is_alive():
                self.signal(self.processes.index(process), signal.SIGUSR2)
                time.sleep(1)
                raise AssertionError(f"a process did not end in {seconds} s:\n{self.said()}")
            process.join()
        return [process.exitcode for process in chosen]

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.is_file() else ""


@contextlib.contextmanager
def started(
    recipe: Path,
    output: Path,
    size: int,
    log: Path,
    function: Callable[[list[str]], int] | None = None,
    **overrides: Any,
) -> Iterator[Ranks]:
    """`hybrid train`, or `function` with its arguments, in `size` processes, which end with the block."""
    texts = [f"{name.replace('__', '.')}={value}" for name, value in overrides.items()]
    ranks = Ranks([str(recipe), f"train.output={output}", *texts], size, log, function or train)
    try:
        yield ranks
    finally:
        for rank, process in enumerate(ranks.processes):
            ranks.signal(rank, signal.SIGKILL)
            process.join()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of its own at `folder`, of some size such as 3m."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk that fills needs root and the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no space, by a file named filler."""
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def train(arguments: list[str]) -> int:
    from hybrid.cli.main import main

    return main(["train", *arguments])


def _run(
    function: Callable[[list[str]], int], arguments: list[str], environment: dict[str, str], log: str
) -> None:
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR2, file=2)
    sys.exit(function(arguments))
