"""Persistent pools of gloo ranks: processes, started once per test session, that run functions together."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

START_SECONDS = 120
CALL_SECONDS = 90


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(connection: Any, rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    warnings.simplefilter("ignore", FutureWarning)
    from hybrid.train import distributed

    distributed.start(threads=1)
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
        answers = self._answers(timeout)
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            self.close()  # its ranks may be out of step
            raise RankFailure("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, rank, self.size, port), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._connections.append(ours)
        self._answers(START_SECONDS)

    def _answers(self, timeout: float) -> list[tuple[bool, Any]]:
        end = time.monotonic() + timeout
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, end - time.monotonic())):
                    raise RankFailure(f"rank {rank} of {self.size} did not answer within {timeout} s")
                answers.append(connection.recv())
            except (EOFError, ConnectionError) as error:
                self.close()
                raise RankFailure(f"rank {rank} of {self.size} died") from error
            except RankFailure:
                self.close()
                raise
        return answers
