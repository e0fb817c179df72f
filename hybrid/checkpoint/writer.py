"""Writing checkpoints while training goes on.

A save stops training only to copy the state to host memory. A thread of every rank that has files to write
then writes them; when all are done the main rank's thread adds the checksums, gives the tag its name, drops
old ones and copies it to the second folder. Threads never communicate: the ranks learn from each other in
`advance`, between two passes of the model. What goes wrong on a disk is said, and training goes on with the
checkpoints there are.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybrid.distributed.world import World
from hybrid.errors import words
from hybrid.files import PARTIAL, sha256, write_json

from . import tensor_files
from .folder import MANIFEST, TRAINER, CheckpointFolder, Origin, Progress, tag_name, tags_in
from .tensor_files import INDEX, TensorFile
from .zero_state import ZeroState

SAVE_TIMEOUT = 60.0
"""Seconds that a save waits at most for the one before it; then it is left out."""

Sums = dict[str, dict[str, Any]]
"""File name -> its `bytes` and `sha256`."""


class Log(Protocol):
    """Takes messages and values: `hybrid.train.metrics.Metrics`."""

    def say(self, text: str) -> None: ...
    def write(self, step: int, values: dict[str, float]) -> None: ...


def _start(work: Callable[[], Any]) -> Future[Any]:
    """Begin work beside training, in a daemon thread: a disk that never answers must not keep the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
            if not isinstance(error, OSError):
                raise

    threading.Thread(target=run, daemon=True, name="checkpoint writer").start()
    return future


@dataclass
class _Save:
    """A checkpoint on its way to disk."""

    step: int
    partial: Path
    began: float
    job: Future[Any] | None = None
    """What this rank's thread does for it."""
    finishing: bool = False
    """All files are written; the main rank gives the tag its name."""


class Writer:
    """Saves of a run, one at a time. Every method is called by all ranks, but for `close`."""

    def __init__(
        self, folder: CheckpointFolder, state: ZeroState, origin: Origin, world: World, log: Log
    ) -> None:
        self._folder, self._state, self._origin = folder, state, origin
        self._world, self._log = world, log
        self._failures = 0
        self._save: _Save | None = None
        self.begun_step = self.saved_step = -1
        """Steps of the last save that was tried, and of the last on disk; -1 for none."""
        self.failure = ""
        """Why the last save that failed did so."""

    def begin(self, progress: Progress, *, no_timeout: bool = False) -> None:
        """Take the state as it is now, and start to write it.

        `no_timeout`: wait for the save before this one however long it takes, not just SAVE_TIMEOUT.
        """
        began, step = time.perf_counter(), progress.step
        if self._save is not None and not self._settle(None if no_timeout else SAVE_TIMEOUT):
            waited = time.perf_counter() - self._save.began
            self.begun_step = step
            self._fail(
                step,
                f"the checkpoint of step {step} is left out: that of step {self._save.step} is still being "
                f"written after {waited:.0f} s, the disk is slow",
            )
            return
        self.begun_step = step
        save = _Save(step, self._folder.path / (tag_name(step) + PARTIAL), began)
        problem: OSError | None = None
        try:
            if self._world.main:
                self._folder.make_room(save.partial)
        except OSError as error:
            problem = error
        if found := self._world.problems(problem):
            self._give_up(save, found)
            return
        files = self._state.capture()
        record = {"progress": asdict(progress), "origin": asdict(self._origin)}
        index = tensor_files.index(self._state.files()) if self._world.main else None
        save.job = _start(lambda: self._write(save.partial, files, record, index))
        self._save = save
        self._log.write(step, {"checkpoint/stall_seconds": time.perf_counter() - began})

    def advance(self) -> None:
        """See how far the save on its way has come; costs nothing when there is none."""
        save = self._save
        if save is None:
            return
        job = save.job
        if self._world.gather_numbers([job is not None and not job.done()]).any():
            return
        if found := self._world.problems(job.exception() if job else None):
            self._save = None
            self._give_up(save, found)
        elif save.finishing:
            self._save = None
            self._saved(save, job.result() if job else [])
        else:
            assert job is not None
            sums = {
                name: entry for found in self._world.gather(job.result()) for name, entry in found.items()
            }
            save.finishing = True
            save.job = _start(lambda: self._finish(save.partial, sums)) if self._world.main else None

    def wait(self) -> None:
        """Wait until the save on its way is on disk, or has failed."""
        self._settle(None)

    def close(self) -> None:
        """Finish what this rank is writing, when training ends by an error."""
        if self._save is not None and self._save.job is not None:
            concurrent.futures.wait([self._save.job], SAVE_TIMEOUT)

    def _settle(self, seconds: float | None) -> bool:
        """Wait for the save on its way; returns whether it is over."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._save is not None:
            jobs = [self._save.job] if self._save.job else []
            left = None if end is None else max(0.0, end - time.monotonic())
            _, overdue = concurrent.futures.wait(jobs, left)
            if self._world.gather_numbers([len(overdue)]).any():
                return False
            self.advance()
        return True

    def _write(
        self, partial: Path, files: list[tuple[TensorFile, list[Tensor]]], record: Any, index: Any
    ) -> Sums:
        """Write this rank's files; the main rank adds the record."""
        sums: Sums = {}
        for file, chunks in files:
            size, digest = tensor_files.write(
                partial / file.name, file.header(), chunks, self._world.heartbeat.beat
            )
            sums[file.name] = {"bytes": size, "sha256": digest}
        if self._world.main:
            for name, content in {TRAINER: record, INDEX: index}.items():
                if content is not None:
                    write_json(partial / name, content)
                    size = (partial / name).stat().st_size
                    sums[name] = {"bytes": size, "sha256": sha256(partial / name)}
        return sums

    def _finish(self, partial: Path, sums: Sums) -> list[str]:
        """Main rank: make a tag of the written files. Returns why it could not be copied, or old ones could
        not be deleted, if so."""
        for name, entry in sums.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != entry["bytes"]:
                raise OSError(
                    f"the main process does not see {name} as another wrote it: all hosts need one folder "
                    "for train.output"
                )
        write_json(partial / MANIFEST, {"files": sums})
        problems = self._folder.publish(partial)
        try:
            problems += self._folder.publish_copy(partial.stem, self._world.heartbeat.beat)
        except OSError as error:  # shutil.Error too
            problems.append(
                f"could not copy checkpoint {partial.stem} to {self._folder.copy}: {words(error)}"
            )
        return problems

    def _saved(self, save: _Save, problems: list[str]) -> None:
        self.saved_step = save.step
        self._log.write(save.step, {"checkpoint/seconds": time.perf_counter() - save.began})
        for problem in problems:
            self._log.say(f"{problem}; training goes on")

    def _give_up(self, save: _Save, problem: str) -> None:
        """Give the space back, and say what is left."""
        newest: list[str] = []
        if self._world.main:
            shutil.rmtree(save.partial, ignore_errors=True)
            newest = tags_in(self._folder.path)[-1:]
        kept = f"the newest good checkpoint is {newest[0]}" if newest else "there is no earlier checkpoint"
        where = self._folder.path / save.partial.stem
        self._fail(save.step, f"could not write checkpoint {where}: {problem}; {kept}")

    def _fail(self, step: int, failure: str) -> None:
        self._failures += 1
        self.failure = failure
        self._log.say(f"{failure}; training goes on")
        self._log.write(step, {"checkpoint/failures": self._failures})
