"""Timing of runs that take turns in one process, and of named steps inside a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch


def synchronise(device: torch.device | str = "cpu") -> None:
    """Wait until the device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], Any], device: torch.device | str = "cpu") -> float:
    """Wall time of one run."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def alternate(
    runs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    limit: float = 60.0,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Median seconds of each run, the runs taking turns so that a busy moment of the machine hits all alike.

    A first round is not counted unless it takes more than `limit` / 4 seconds, of which starting up is a
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
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @property
    def inside(self) -> tuple[str, ...]:
        """Labels of the steps now running, the outermost first."""
        return tuple(self._open)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        self._turn()
        self._open.append(label)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def _turn(self) -> None:
        """Book the time since the last turn on the step that ran."""
        synchronise(self.device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def watching(self, *functions: tuple[Any, str, str | Callable[..., str]]) -> Iterator[None]:
        """Inside, calls of `owner.name` are steps. A label is a text, or made from the call's arguments."""
        with ExitStack() as stack:
            for owner, name, label in functions:
                watched = self._watched(getattr(owner, name), label)
                stack.enter_context(mock.patch.object(owner, name, watched))
            yield

    def _watched(self, function: Callable[..., Any], label: str | Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.step(label if isinstance(label, str) else label(*args)):
                return function(*args, **kwargs)

        return call
