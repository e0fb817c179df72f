"""Measuring: runs that take turns, functions inside a run, and peak memory.

Memory is the process's resident memory, as that is what a user runs out of: an allocator's view would leave
out what operators take for themselves. It counts from a baseline, when the inputs are there, to the kernel's
high-water mark, which is reset at the baseline; so output and gradients count.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from hybrid.train.benchmark import seconds

Run = Callable[[], Any]


def alternate(
    runs: Mapping[str, Run], *, rounds: int = 5, limit: float = 60.0, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Take the median seconds of each run; runs take turns, so that a busy moment of the machine hits all.

    The first round is not counted unless it takes more than `limit` / 4 seconds, of which starting up is a
    small part. Beyond `limit` seconds no new round begins once there are three.
    """
    start = time.perf_counter()
    times = {name: [seconds(run, device)] for name, run in runs.items()}
    if time.perf_counter() - start < limit / 4:
        times = {name: [] for name in runs}
        start = time.perf_counter()
    for done in range(max(map(len, times.values())), rounds):
        if done >= 3 and time.perf_counter() - start > limit:
            break
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    return {name: median(found) for name, found in times.items()}


class Steps:
    """Seconds by label, each without the labelled steps inside it."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.cuda = torch.device(device).type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Time what is inside."""
        self._turn()
        self._open.append(label)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Book the time since the last turn on the step that ran."""
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def watching(self, functions: Mapping[tuple[Any, str], str]) -> Iterator[None]:
        """Time calls of functions inside; each is given by its owner and name, with its label."""
        with ExitStack() as stack:
            for (owner, name), label in functions.items():
                watched = self._watched(getattr(owner, name), label)
                stack.enter_context(mock.patch.object(owner, name, watched))
            yield

    def _watched(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.step(label):
                return function(*args, **kwargs)

        return call


def peak_bytes(make: Callable[..., Run], *arguments: Any, tokens: int, small: int) -> int:
    """Measure the run that `make(*arguments, tokens)` returns, in a new process.

    There the same work with `small` tokens comes first: it loads the libraries.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_peak_bytes, make, arguments, tokens, small).result()


def _peak_bytes(make: Callable[..., Run], arguments: tuple[Any, ...], tokens: int, small: int) -> int:
    make(*arguments, small)()
    return seconds_and_peak(make(*arguments, tokens))[1]


def seconds_and_peak(run: Run) -> tuple[float, int]:
    """Measure the seconds of a run, and the bytes at its peak above what this process held before."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
        before = _status("VmRSS")
    except OSError:  # not allowed in every container
        before = _status("VmHWM")
    taken = seconds(run)
    return taken, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
