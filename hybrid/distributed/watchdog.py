"""A watchdog: a process that is stopped, hung or gone ends all others, with the stack of each.

Each process tells the others, through the store where they met, how often its `Heartbeat` has beaten. In
synchronous training one that stands still makes all stand still within a step, so a process ends when nobody
makes progress, or when one is not heard of any more. Two threads do this beside training: `_Talker` may be
kept waiting by the store, `_Judge` by nothing.
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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.errors import LOST_EXIT_CODE

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
    board = _Board(world, timeout)
    threads: list[_Talker | _Judge] = [_Judge(board, log)]
    if world.store is not None:
        threads.append(_Talker(board, world.gather(uuid.uuid4().hex)[0]))
        world.barrier()  # everybody has spoken once
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        board.over.set()
        for thread in threads:
            thread.join(timeout=2 * board.period)
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


class _Report(NamedTuple):
    """What a process says of itself."""

    beats: int = -1
    doing: str = "starting"
    untimed: bool = False
    waiting: bool = False
    done: bool = False


_STARTING = _Report()


@dataclass
class _Rank:
    """What is known of one rank; times by this process' clock."""

    heard: float
    """When it last said anything."""
    moved: float
    """When its beats were last seen to have grown."""
    looks: int = 0
    """Times it was asked since, without news: a process that cannot ask does not take others for silent."""
    said: _Report = _STARTING

    def update(self, now: float, said: _Report) -> None:
        self.heard, self.looks = now, 0
        if said.beats != self.said.beats:
            self.moved = now
        self.said = said


class _Board:
    """What the threads share."""

    def __init__(self, world: World, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.period = min(max(LONGEST_BETWEEN_LOOKS, world.size / 50), timeout / LOOKS)
        self.limit = timeout - LOOKS_TO_END * self.period
        self.over = threading.Event()
        now = time.monotonic()
        self.ranks = {rank: _Rank(now, now) for rank in range(world.size)}
        self.store_answered = now
        self.verdict = ""
        """Why all have to end; set by this process or another."""

    def look_at_myself(self, now: float) -> _Report:
        beat = self.world.heartbeat
        said = _Report(beat.beats, beat.doing, beat.untimed > 0, beat.waiting)
        self.ranks[self.world.rank].update(now, said)
        return said

    def pause(self, seconds: float) -> None:
        """Do not count a time in which this process, or the machine, did not run."""
        now = time.monotonic()
        self.store_answered = min(now, self.store_answered + seconds)
        for rank in self.ranks.values():
            rank.heard, rank.moved = min(now, rank.heard + seconds), min(now, rank.moved + seconds)


class _Talker(threading.Thread):
    """Says how this process is, and reads how the others are."""

    def __init__(self, board: _Board, name: str) -> None:
        super().__init__(daemon=True, name="watchdog: talker")
        self._board, self._name = board, name
        self._store: Any = None
        self._last: dict[int, bytes] = {}
        self._number = 0
        self._exchange()

    def run(self) -> None:
        while not self._board.over.wait(self._board.period):
            try:
                self._exchange()
            except RuntimeError:  # no answer in time, or a lost connection: the judge sees it by the clock
                self._store = None
        with suppress(RuntimeError):
            self._say(done=True)

    def _exchange(self) -> None:
        board = self._board
        if self._store is None:
            store: Any = board.world.store
            self._store = store.clone()  # a connection of its own, as the other one may be waiting
            self._store.set_timeout(timedelta(seconds=max(1.0, 2 * board.period)))
        self._say(done=False)
        if board.verdict:
            self._store.set(f"{self._name}/verdict", board.verdict)
        elif self._store.check([f"{self._name}/verdict"]):
            board.verdict = self._store.get(f"{self._name}/verdict").decode()
        if self._number > 1:  # by then all have spoken
            for rank, text in enumerate(self._store.multi_get([self._key(r) for r in board.ranks])):
                if rank != board.world.rank:
                    self._read(rank, text)
        board.store_answered = time.monotonic()

    def _say(self, *, done: bool) -> None:
        self._number += 1  # tells two reports apart that say the same
        said = self._board.look_at_myself(time.monotonic())._replace(done=done)
        if self._store is not None:
            self._store.set(self._key(self._board.world.rank), json.dumps([self._number, *said]))

    def _read(self, rank: int, text: bytes) -> None:
        if text == self._last.get(rank):
            self._board.ranks[rank].looks += 1
            return
        self._last[rank] = text
        self._board.ranks[rank].update(time.monotonic(), _Report(*json.loads(text)[1:]))

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


class _Judge(threading.Thread):
    """Ends this process when there is a verdict."""

    def __init__(self, board: _Board, log: Path) -> None:
        super().__init__(daemon=True, name="watchdog: judge")
        self._board, self._log = board, log

    def run(self) -> None:
        board, last = self._board, time.monotonic()
        while not board.over.wait(board.period):
            # In case a thread never gives Python's lock back: then nothing but this C function can act.
            faulthandler.dump_traceback_later(board.timeout, exit=True, file=2)
            now = time.monotonic()
            slept, last = now - last - board.period, now
            if slept > 3 * board.period:
                board.pause(slept)
            board.look_at_myself(now)
            board.verdict = board.verdict or self._verdict(now)
            if board.verdict and not board.over.is_set():
                self._end(now)

    def _verdict(self, now: float) -> str:
        """Say who is silent, or makes no progress while nobody else does either; empty when all is well."""
        board, me, limit = self._board, self._board.world.rank, self._board.limit
        running = {r: rank for r, rank in board.ranks.items() if r == me or not rank.said.done}
        if board.world.store is not None and now - board.store_answered > limit:
            silent = [0]  # keeps the store
        else:
            silent = [
                r
                for r, rank in running.items()
                if r != me and rank.looks > LOOKS // 4 and now - rank.heard > limit
            ]
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
        board, world = self._board, self._board.world
        lines = [f"rank {world.rank} of {world.size} ends, as the run hangs: {board.verdict}."]
        for number, rank in board.ranks.items():
            doing = "done" if rank.said.done else rank.said.doing
            lines.append(
                f"  rank {number}: {doing}{' (waits)' if rank.said.waiting else ''}, "
                f"heard {max(0.0, now - rank.heard):.0f} s ago, last progress {now - rank.moved:.0f} s ago"
            )
        lines.append(
            f"(train.hang_timeout={board.timeout:g}; exit code {LOST_EXIT_CODE}: the same command goes on "
            f"from the newest checkpoint.) Rank {world.rank} is here:"
        )
        text = "\n".join(lines) + "\n" + _stacks()
        os.write(2, text.encode())  # not through sys.stderr, whose lock a hung thread may hold
        with suppress(OSError), open(self._log, "a", encoding="utf-8") as file:
            file.write(text)
        time.sleep(3 * board.period)  # for the others to hear the verdict before the connections break
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
