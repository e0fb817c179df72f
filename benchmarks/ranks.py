"""Processes that wait for functions to run together, as the ranks of a training run."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Self

from hybrid.distributed.environment import free_port


class Ranks:
    """`size` processes of one CPU thread each, joined as those of a run are; a context manager."""

    def __init__(self, size: int) -> None:
        self.size = size
        context, port = multiprocessing.get_context("spawn"), free_port()
        self._processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call an importable function on every rank; return the results in rank order.

        Raises RuntimeError with the rank's traceback when one fails.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                good, value = pipe.recv()
            except EOFError:
                good, value = False, "it ended"
            if not good:
                raise RuntimeError(f"rank {rank} of {self.size}: {value}")
            answers.append(value)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Any, rank: int, size: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
