"""A watchdog: a process that is stopped, hung or gone ends all others, with the stack of each.

Each process tells the others, through the store where they met, how often its `Heartbeat` has beaten. In
synchronous training one that stands still makes all stand still within a step, so a process ends when nobody
makes progress, or when one is not heard of any more. Two threads do this beside training: the talker may be
kept waiting by the store, the judge by nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.errors import LOST_EXIT_CODE
from hybrid.files import no_link

from .world import World

LOOKS = 20
"""Looks at the others in the time allowed, at least."""
LONGEST_BETWEEN_LOOKS = 5.0
"""Seconds, for up to 250 processes; more look less often, as all ask one store."""
LOOKS_TO_END = 8
"""So many are kept for telling the others of the verdict and for ending."""


@contextmanager
def watching(world: World, timeout: float, log: Path) -> Iterator[None]:
    """Watch while the block runs: without progress in `timeout` seconds the process writes its threads'
    stacks to standard error and the file `log`, and exits with LOST_EXIT_CODE."""
    watchdog = _Watchdog(world, timeout, log)
    loops = [watchdog.judge] if world.store is None else [watchdog.judge, watchdog.talk]
    threads = [threading.Thread(target=loop, name="watchdog", daemon=True) for loop in loops]
    world.barrier()  # everybody has spoken once
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        watchdog.over.set()
        for thread in threads:
            thread.join(timeout=2 * watchdog.period)
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def compilation_takes_time(world: World) -> Iterator[None]:
    """Exempt torch.compile's work from the timeout while the block runs."""
    from torch._dynamo.callback import callback_handler

    heartbeat = world.heartbeat

    def begin(_: Any) -> None:
        heartbeat.untimed += 1

    def end(_: Any) -> None:
        heartbeat.untimed -= 1
        heartbeat.beat()

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)


@contextmanager
def compiled_kernels_are_progress(world: World) -> Iterator[None]:
    """Count every kernel that Triton compiles while the block runs: trying out hundreds of them for the first
    step, as flash-linear-attention does, takes minutes but is no hang."""
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    runtime, heartbeat = knobs.runtime, world.heartbeat
    before = runtime.jit_post_compile_hook

    def compiled(*args: Any, **kwargs: Any) -> Any:
        heartbeat.beat()
        return before(*args, **kwargs) if before else None

    runtime.jit_post_compile_hook = compiled
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before


class _Report(NamedTuple):
    """What a process says of itself."""

    beats: int = -1
    doing: str = "starting"
    untimed: bool = False
    waiting: bool = False
    done: bool = False


@dataclass
class _Rank:
    """What is known of one rank; times by this process' clock."""

    heard: float
    """When it last said anything."""
    moved: float
    """When its beats were last seen to have grown."""
    looks: int = 0
    """Times it was asked since, without news: a process that cannot ask does not take others for silent."""
    said: _Report = field(default_factory=_Report)

    def update(self, now: float, said: _Report) -> None:
        self.heard, self.looks = now, 0
        if said.beats != self.said.beats:
            self.moved = now
        self.said = said


class _Watchdog:
    """What is known of all ranks, and the two loops that the threads run."""

    def __init__(self, world: World, timeout: float, log: Path) -> None:
        self._world, self._timeout, self._log = world, timeout, log
        self.period = min(max(LONGEST_BETWEEN_LOOKS, world.size / 50), timeout / LOOKS)
        self._limit = timeout - LOOKS_TO_END * self.period
        self.over = threading.Event()
        now = time.monotonic()
        self._ranks = {rank: _Rank(now, now) for rank in range(world.size)}
        self._verdict = ""
        """Why all have to end; found by this process or another."""
        self._key = world.gather(uuid.uuid4().hex)[0]
        """What the store's keys of this run begin with."""
        self._store: Any = None
        self._store_answered = now
        self._last: dict[int, bytes] = {}
        self._number = 0
        if world.store is not None:
            self._exchange()

    def talk(self) -> None:
        """Say how this process is, and read how the others are."""
        while not self.over.wait(self.period):
            try:
                self._exchange()
            except RuntimeError:  # no answer in time, or a lost connection: the judge sees it by the clock
                self._store = None
        with suppress(RuntimeError):
            self._say(done=True)

    def judge(self) -> None:
        """End this process when there is a verdict."""
        last = time.monotonic()
        while not self.over.wait(self.period):
            # In case a thread never gives Python's lock back: then nothing but this C function can act.
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=2)
            now = time.monotonic()
            slept, last = now - last - self.period, now
            if slept > 3 * self.period:
                self._pause(slept)
            self._look_at_myself(now)
            self._verdict = self._verdict or self._find_verdict(now)
            if self._verdict and not self.over.is_set():
                self._end(now)

    def _look_at_myself(self, now: float) -> _Report:
        beat = self._world.heartbeat
        said = _Report(beat.beats, beat.doing, beat.untimed > 0, beat.waiting)
        self._ranks[self._world.rank].update(now, said)
        return said

    def _exchange(self) -> None:
        if self._store is None:
            store: Any = self._world.store
            self._store = store.clone()  # a connection of its own, as the other one may be waiting
            self._store.set_timeout(timedelta(seconds=max(1.0, 2 * self.period)))
        self._say(done=False)
        if self._verdict:
            self._store.set(f"{self._key}/verdict", self._verdict)
        elif self._store.check([f"{self._key}/verdict"]):
            self._verdict = self._store.get(f"{self._key}/verdict").decode()
        if self._number > 1:  # by then all have spoken
            texts = self._store.multi_get([f"{self._key}/{rank}" for rank in self._ranks])
            for rank, text in enumerate(texts):
                if rank != self._world.rank:
                    self._read(rank, text)
        self._store_answered = time.monotonic()

    def _say(self, *, done: bool) -> None:
        self._number += 1  # tells two reports apart that say the same
        said = self._look_at_myself(time.monotonic())._replace(done=done)
        if self._store is not None:
            self._store.set(f"{self._key}/{self._world.rank}", json.dumps([self._number, *said]))

    def _read(self, rank: int, text: bytes) -> None:
        if text == self._last.get(rank):
            self._ranks[rank].looks += 1
            return
        self._last[rank] = text
        self._ranks[rank].update(time.monotonic(), _Report(*json.loads(text)[1:]))

    def _pause(self, seconds: float) -> None:
        """Do not count a time in which this process, or the machine, did not run."""
        now = time.monotonic()
        self._store_answered = min(now, self._store_answered + seconds)
        for rank in self._ranks.values():
            rank.heard, rank.moved = min(now, rank.heard + seconds), min(now, rank.moved + seconds)

    def _find_verdict(self, now: float) -> str:
        """Say who is silent, or makes no progress while nobody else does either; empty when all is well."""
        me, limit = self._world.rank, self._limit
        running = {r: rank for r, rank in self._ranks.items() if r == me or not rank.said.done}
        silent = [
            r for r, rank in running.items()
            if r != me and rank.looks > LOOKS // 4 and now - rank.heard > limit
        ]  # fmt: skip
        if self._world.store is not None and now - self._store_answered > limit:
            silent = [0]  # keeps the store
        if silent and me not in silent:
            return f"{_ranks(silent)} silent for {limit:.0f} s: stopped, killed, or cut off"
        if any(rank.said.untimed or now - rank.moved <= limit for rank in running.values()):
            return ""
        awaited = [r for r, rank in running.items() if not rank.said.waiting]
        if 0 < len(awaited) < len(running):
            return f"nobody made progress for {limit:.0f} s, {_ranks(awaited)} what the others wait for"
        least = min(rank.said.beats for rank in running.values())
        slowest = [r for r, rank in running.items() if rank.said.beats == least]
        return f"nobody made progress for {limit:.0f} s, {_ranks(slowest)} least far"

    def _end(self, now: float) -> None:
        world = self._world
        lines = [f"rank {world.rank} of {world.size} ends, as the run hangs: {self._verdict}."]
        for number, rank in self._ranks.items():
            doing = "done" if rank.said.done else rank.said.doing
            lines.append(
                f"  rank {number}: {doing}{' (waits)' if rank.said.waiting else ''}, "
                f"heard {max(0.0, now - rank.heard):.0f} s ago, last progress {now - rank.moved:.0f} s ago"
            )
        lines.append(
            f"(train.hang_timeout={self._timeout:g}; exit code {LOST_EXIT_CODE}: the same command goes on "
            f"from the newest checkpoint.) Rank {world.rank} is here:"
        )
        text = "\n".join(lines) + "\n" + _stacks()
        os.write(2, text.encode())  # not through sys.stderr, whose lock a hung thread may hold
        with suppress(OSError), open(self._log, "a", encoding="utf-8", opener=no_link) as file:
            file.write(text)
        time.sleep(3 * self.period)  # for the others to hear the verdict before the connections break
        os._exit(LOST_EXIT_CODE)


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed} are"


def _stacks() -> str:
    """Format every thread's stack as faulthandler does."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
