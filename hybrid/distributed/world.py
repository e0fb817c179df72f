"""The processes of one run: joining them, what they exchange, and what they must agree on.

A run is one process (`hybrid train`), or several started by the deepspeed launcher or torchrun, which tell
each its place through RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.errors import TrainError, words

from . import environment

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer than this for the others gives up; preparing data is exempt."""
JOIN_TIMEOUT = timedelta(minutes=5)
"""The launcher's processes must all have come by then."""


class Heartbeat:
    """Signs of life of this process, which the watchdog passes on to the others."""

    def __init__(self) -> None:
        self.beats = 0
        """Steps of work finished so far."""
        self.doing = "starting"
        self.untimed = 0
        """How many `no_timeout` blocks are open."""
        self.waiting = False
        """Whether this process waits for others."""

    def beat(self, doing: str = "") -> None:
        """Count a finished step of work; `doing`: what comes next, if it has a name."""
        self.beats += 1
        self.doing = doing or self.doing

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Mark an exchange between the processes."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def no_timeout(self, doing: str) -> Iterator[None]:
        """Allow work of any length without beats: data preparation, compilation, building a model."""
        before, self.doing = self.doing, doing
        self.untimed += 1
        try:
            yield
        finally:
            self.untimed -= 1
            self.beat(before)


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
    heartbeat: Heartbeat = field(default_factory=Heartbeat, compare=False)

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which writes shared files and talks to the terminal."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Collect every rank's `value` (a small picklable object of ours), in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.heartbeat.wait():
            dist.all_gather_object(values, value)
        return values

    def gather_numbers(self, numbers: list[float]) -> Tensor:
        """Collect all ranks' numbers as one float64 `[ranks, len(numbers)]` on the CPU."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.size == 1:
            return mine.cpu()[None]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.heartbeat.wait():
            dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def problems(self, problem: BaseException | None) -> str | None:
        """Put all ranks' problems in words, on every rank; None when no rank has one."""
        texts = self.gather(None if problem is None else words(problem))
        if self.size == 1:
            return texts[0]
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if text:
                ranks_of.setdefault(text, []).append(rank)
        listed = [f"rank {', '.join(map(str, r))} of {self.size}: {text}" for text, r in ranks_of.items()]
        return "; ".join(listed) or None

    def raise_if_any(self, problem: Exception | None) -> None:
        """Stop all ranks when one has a problem, with one message.

        Raises the problem on the main rank (as TrainError when another rank's) and SystemExit(2) on the
        others.
        """
        found = self.problems(problem)
        if found is None:
            return
        if not self.main:
            raise SystemExit(2) from problem
        raise problem or TrainError(found)

    @contextmanager
    def all_ranks_or_none(self) -> Iterator[None]:
        """Run a block without collectives that succeeds on all ranks, or stops all with one message."""
        problem: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            problem = error
        self.raise_if_any(problem)

    def rank0_only(self, work: Callable[[], T], *, no_timeout: bool = False) -> T | None:
        """Let the main rank do something; all go on when it is done, or stop when it failed.

        Args:
            work: its result is returned on the main rank, None on the others.
            no_timeout: the others wait for as long as it takes, not just COLLECTIVE_TIMEOUT.
        """
        group, result = None, None
        if no_timeout and self.size > 1:
            group = dist.new_group(backend="gloo", timeout=timedelta(days=30))
        problem: Exception | None = None
        try:
            if self.main:
                label = "one process works for all"
                with self.heartbeat.no_timeout(label) if no_timeout else nullcontext():
                    result = work()
        except (ValueError, OSError) as error:
            problem = error
        if group is not None:
            dist.barrier(group)
            dist.destroy_process_group(group)
        self.raise_if_any(problem)
        return result

    def check_equal(self, what: str, value: Any) -> None:
        """Stop all ranks unless `value` is equal on them."""
        values = self.gather(value)
        if any(other != values[0] for other in values):
            listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            self.raise_if_any(TrainError(f"the processes of this run disagree about {what}: {listed}"))


def start(threads: int | None = None) -> World:
    """Join the run's other processes, or be the only one; picks device and backend by what is there.

    Args:
        threads: CPU threads of this process; None: see `environment.default_threads`.

    Raises TrainError when the launcher's variables are incomplete, a GPU is missing or the port is busy.
    """
    environment.set_single_process()
    size = environment.number("WORLD_SIZE", least=1)
    rank, local_rank = environment.number("RANK", below=size), environment.number("LOCAL_RANK", below=size)
    local_size = environment.number(
        "LOCAL_WORLD_SIZE", environment.number("LOCAL_SIZE", size, least=1), least=1
    )
    # What decays to nothing, as the start of a long sequence does in a linear RNN, ends in denormal numbers,
    # which CPUs compute ten times as slowly. Before threads start, which take this over.
    torch.set_flush_denormal(True)
    if threads is None:
        threads = environment.default_threads(local_size)
    if threads is not None:
        torch.set_num_threads(threads)
    device = _device(local_rank)
    # After DS_ACCELERATOR is set. DeepSpeed would compile its shared-memory collective at first use, which
    # takes a minute and a half, needs a compiler, and killed midway leaves a lock file on which every later
    # run waits for ever; gloo does the same work.
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        _initialise(device, rank, size)
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False, auto_mpi_discovery=False)
    store = dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    return World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, store)


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


def _initialise(device: torch.device, rank: int, size: int) -> None:
    """Make torch's default process group."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    if size == 1:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
        return
    address, port = os.environ["MASTER_ADDR"], environment.number("MASTER_PORT", least=1, below=2**16)
    where = f"{address}:{port}"
    text = f"rank {rank} waits for the other {size - 1} processes at {where}, for at most {JOIN_TIMEOUT}"
    waiting = threading.Timer(20, print, (text,), {"file": sys.stderr, "flush": True})
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
