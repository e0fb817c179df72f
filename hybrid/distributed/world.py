"""The processes of one run: starting them, and what they must agree on.

A run is one process (`hybrid train`), or several started by the deepspeed launcher or torchrun, which tell
each its place through RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.errors import LostError, TrainError, words

from . import environment as launcher
from .pulse import Pulse

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer than this for the others gives up; preparing data is exempt."""
JOIN_TIMEOUT = timedelta(minutes=5)
"""The launcher's processes must all have come by then."""
_LOST = re.compile(r"gloo|NCCL|[Cc]onnection (reset|closed|refused)|Broken pipe")


@dataclass(frozen=True)
class World:
    """This process' place among all."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store | None = field(default=None, compare=False)
    """Where the processes met; None for one process alone."""
    pulse: Pulse = field(default_factory=Pulse, compare=False)

    @property
    def main(self) -> bool:
        """The one process that writes shared files and talks to the terminal."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (a small picklable object of ours), in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.pulse.wait():
            dist.all_gather_object(values, value)
        return values

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """All ranks' numbers as one float64 `[ranks, len(numbers)]` on the CPU."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.size == 1:
            return mine.cpu()[None]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.pulse.wait():
            dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def agree(self, problem: Exception | None) -> None:
        """Go on only when no rank has a problem.

        Raises the problem on the main rank (as TrainError when another rank's) and SystemExit(2) on the
        others, so that a job ends with one message.
        """
        found = self.problems(problem)
        if found is None:
            return
        if not self.main:
            raise SystemExit(2) from problem
        raise problem or TrainError(found)

    def problems(self, problem: Exception | None) -> str | None:
        """All ranks' problems in words, on every rank; None when no rank has one."""
        texts = self.gather(None if problem is None else words(problem))
        said: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if text:
                said.setdefault(text, []).append(rank)
        if self.size == 1:
            return texts[0]
        listed = [f"rank {', '.join(map(str, ranks))} of {self.size}: {text}" for text, ranks in said.items()]
        return "; ".join(listed) or None

    @contextmanager
    def together(self) -> Iterator[None]:
        """A stretch of work without collectives that succeeds on all ranks or stops all with one message."""
        problem: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            problem = error
        self.agree(problem)

    def on_main(self, work: Callable[[], None], *, patient: bool = False) -> None:
        """Let the main rank do something; all go on when it is done, or stop when it failed.

        `patient`: the others wait for as long as it takes, not just COLLECTIVE_TIMEOUT.
        """
        if not patient or self.size == 1:
            with self.together():
                if self.main:
                    with self.pulse.patience("one process works for all") if patient else nullcontext():
                        work()
            return
        problem: Exception | None = None
        group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        try:
            if self.main:
                with self.pulse.patience("one process works for all"):
                    work()
        except (ValueError, OSError) as error:
            problem = error
        dist.barrier(group)
        dist.destroy_process_group(group)
        self.agree(problem)

    def same(self, what: str, value: Any) -> None:
        """Stop all ranks unless `value` is equal on them."""
        values = self.gather(value)
        if all(other == values[0] for other in values):
            return
        listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
        self.agree(TrainError(f"the processes of this run disagree about {what}: {listed}"))


def start(threads: int | None = None) -> World:
    """Join the run's other processes, or be the only one; picks device and backend by what is there.

    Args:
        threads: CPU threads of this process; None: torch's choice for one process, cores / processes for
            several.

    Raises TrainError when the launcher's variables are incomplete, a GPU is missing or the port is busy.
    """
    _fill_in_single_process()
    size = launcher.number("WORLD_SIZE", least=1)
    rank, local_rank = launcher.number("RANK", below=size), launcher.number("LOCAL_RANK", below=size)
    local_size = launcher.number("LOCAL_WORLD_SIZE", launcher.number("LOCAL_SIZE", size, least=1), least=1)
    # What decays to nothing, as the start of a long sequence does in a linear RNN, ends in denormal numbers,
    # which CPUs compute ten times as slowly. Before threads start, which take this over.
    torch.set_flush_denormal(True)
    _set_threads(threads, local_size)
    device = _device(local_rank)
    _without_compilers()
    if not dist.is_initialized():
        _initialise(device, rank, size)
    import deepspeed

    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, auto_mpi_discovery=False)
    store = dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, store)


def stop() -> None:
    """Leave the group; safe when it was never joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _fill_in_single_process() -> None:
    if launcher.is_used():
        return
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(launcher.free_port()),
    )  # fmt: skip


def _set_threads(threads: int | None, local_size: int) -> None:
    if threads is None and local_size > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // local_size)
    if threads is not None:
        torch.set_num_threads(threads)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # said, DeepSpeed does not warn about it
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise TrainError(
            f"local rank {local_rank} has no GPU: {found} on this machine; start at most {found} processes "
            "here, or set DS_ACCELERATOR=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _without_compilers() -> None:
    """Keep DeepSpeed from compiling its shared-memory collective at first use.

    That build takes a minute and a half, needs a compiler, and one killed midway leaves a lock file on
    which every later run waits for ever; gloo does the same work.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _initialise(device: torch.device, rank: int, size: int) -> None:
    backend = "gloo" if device.type == "cpu" else "nccl"
    if size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
        )
        return
    address, port = os.environ["MASTER_ADDR"], launcher.number("MASTER_PORT", least=1, below=2**16)
    where = f"{address}:{port}"
    words = f"rank {rank} waits for the other {size - 1} processes at {where}, for at most {JOIN_TIMEOUT}"
    waiting = threading.Timer(20, print, (words,), {"file": sys.stderr, "flush": True})
    waiting.start()
    try:
        socket.getaddrinfo(address, port)
        store = next(dist.rendezvous("env://", rank, size, timeout=JOIN_TIMEOUT))[0]
        store.set_timeout(COLLECTIVE_TIMEOUT)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    except OSError as error:
        raise TrainError(f"MASTER_ADDR {address} cannot be found: {error.strerror}") from error
    except (RuntimeError, ValueError) as error:
        if "in use" in str(error) or "EADDRINUSE" in str(error):
            raise TrainError(
                f"port {where} is busy, probably with another run: choose a free one with --master_port"
            ) from error
        raise TrainError(f"could not join the {size} processes at {where}: {error}") from error
    finally:
        waiting.cancel()


@contextmanager
def peers_may_end() -> Iterator[None]:
    """Turn what the backends say when another process of the run is gone into words."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise LostError(
            "lost the connection to another process of this run, which ended or cannot be reached; its own "
            "messages say why. The same command goes on from the newest checkpoint "
            f"({str(error).splitlines()[0][:200]})"
        ) from error
