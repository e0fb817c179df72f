"""Building shards in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from hybrid.data.tokenizer import Tokenizer
from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .shards import Unit, build

SAY_EVERY = 10  # seconds


def build_in_processes(
    folder: Path,
    sections: dict[str, SourceSection],
    units: list[Unit],
    processes: int,
    say: Callable[[str], None],
) -> None:
    """Build the units' shards, the largest first. Raises DataError when one is refused or a worker dies."""
    units = sorted(units, key=lambda unit: unit.size, reverse=True)
    spawn = multiprocessing.get_context("spawn")  # a fork is not safe beside torch and its threads
    with ExitStack() as stack:
        with _bare_interpreters():
            lifeline, held = spawn.Pipe(duplex=False)
            job = (lifeline, folder, sections, units)
            pool = stack.enter_context(ProcessPoolExecutor(processes, spawn, _start, job))
            stack.callback(held.close)  # ends the workers, whatever they are doing
            futures = {pool.submit(_build, number): unit for number, unit in enumerate(units)}
        _wait(futures, processes, say)


def _wait(futures: dict[Future[None], Unit], processes: int, say: Callable[[str], None]) -> None:
    said = time.monotonic()
    for done, future in enumerate(as_completed(futures), 1):
        try:
            future.result()
        except BrokenProcessPool:
            lost = [unit for one, unit in futures.items() if isinstance(one.exception(), BrokenProcessPool)]
            names = ", ".join(f"{unit.source}/{unit.name}" for unit in lost[:processes])  # those in work
            raise DataError(
                f"preparing {names} failed: the process ended (killed, or out of memory?); "
                "the same command goes on from what is finished"
            ) from None
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            say(f"{done} of {len(futures)} shards made")


@contextmanager
def _bare_interpreters() -> Iterator[None]:
    """Let processes that are started in the block run one thread each, and nothing of the current folder or
    of the script that called us."""
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONWARNINGS": "ignore:resource_tracker",  # that we left semaphores behind, when we are killed
    }
    before, main = dict(os.environ), sys.modules["__main__"]
    os.environ |= ours
    sys.modules["__main__"] = ModuleType("__main__")  # spawn would import the script anew, by its file
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in ours:
            del os.environ[name]
        os.environ |= before


_work: tuple[Path, dict[str, SourceSection], list[Unit], Tokenizer]
"""In a worker: what `_build` needs beside the unit's number."""


def _start(lifeline: Connection, folder: Path, sections: dict[str, SourceSection], units: list[Unit]) -> None:
    """Set up a worker process. Units come here, once, because a large task in the pool's queue when a worker
    dies would keep the pool from ending (python/cpython#94777)."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the preparation too, which ends us
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    _work = folder, sections, units, Tokenizer.load(folder / "tokenizer.model")


def _end_with(lifeline: Connection) -> None:
    lifeline.poll(None)  # until the preparation closes its end, or is gone
    os._exit(1)


def _build(number: int) -> None:
    folder, sections, units, tokenizer = _work
    build(folder, units[number], sections[units[number].source], tokenizer)
