"""Persistent pools of gloo ranks: processes, started once per test session, that run functions together."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from hybrid.distributed.environment import free_port

START_SECONDS = 120
CALL_SECONDS = 90
GRACE_SECONDS = 5


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


def _serve(connection: Any, rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    warnings.simplefilter("ignore", FutureWarning)
    from hybrid.distributed.world import start

    start(threads=1)
    connection.send((True, None))
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class RankPool:
    """`size` processes that wait for functions to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[Any] = []
        self._connections: list[Any] = []

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = CALL_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Call an importable `function` on every rank; returns their results in rank order.

        Raises RankFailure with the tracebacks, or when a rank is silent for `timeout` seconds: then the pool
        is killed, and started anew by the next call.
        """
        if not self._workers:
            self._start()
        for connection in self._connections:
            connection.send((function, args, kwargs))
        return self._answers(timeout)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, rank, self.size, port), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._connections.append(ours)
        self._answers(START_SECONDS)

    def _answers(self, timeout: float) -> list[Any]:
        """Every rank's result. One that fails leaves the others GRACE_SECONDS, as they may wait for it."""
        end = time.monotonic() + timeout
        results: dict[int, Any] = {}
        faults: list[str] = []
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, end - time.monotonic()))
            if not ready:
                faults += [f"rank {rank} of {self.size} did not answer in time" for rank in waiting]
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    good, value = waiting.pop(rank).recv()
                except (EOFError, ConnectionError):
                    good, value = False, "died"
                if good:
                    results[rank] = value
                else:
                    faults.append(f"rank {rank}: {value}")
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if faults:
            self.close()  # its ranks may be out of step
            raise RankFailure("\n".join(faults))
        return [results[rank] for rank in range(self.size)]
