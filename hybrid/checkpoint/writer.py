"""Writing checkpoints while training goes on.

A save stops training only to copy the state to host memory. A thread of every rank that has files to write
then writes them; when all are done the main rank's thread adds the checksums, gives the tag its name, drops
old ones and copies it to the second folder. Threads never communicate: the ranks learn from each other in
`advance`, between two passes of the model. What goes wrong on a disk is said, and training goes on with the
checkpoints there are.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybrid.distributed.world import World
from hybrid.errors import words
from hybrid.files import PARTIAL, sha256, write_json
from hybrid.train.engine import Engine
from hybrid.train.metrics import Monitor

from . import tensor_files as statefiles
from .folder import Checkpoints
from .tag import MANIFEST, TRAINER, Origin, Progress, tag_name, tags_in
from .tensor_files import StateFile

PATIENCE = 60.0
"""Seconds that a save waits at most for the one before it; then it is left out."""

Sums = dict[str, dict[str, Any]]
"""File name -> its `bytes` and `sha256`."""


class _Job(threading.Thread):
    """Work beside training; afterwards `result`, or in `problem` why there is none."""

    def __init__(self, work: Callable[[], Any]) -> None:
        # A disk that never answers must not keep the process.
        super().__init__(daemon=True, name="checkpoint writer")
        self._work = work
        self.result: Any = None
        self.problem: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except OSError as error:
            self.problem = error


@dataclass
class _Save:
    """One on its way to disk."""

    step: int
    partial: Path
    began: float
    job: _Job | None
    finishing: bool = False
    """All files are written; the main rank gives the tag its name."""


class Saver:
    """Saves of a run, one at a time. Every method is called by all ranks, but for `close`.

    Attributes: `begun_step`, of the last save that was tried; `saved_step`, of the last on disk, -1 for none;
    `failure`, in words, of the last that failed.
    """

    def __init__(self, checkpoints: Checkpoints, world: World, monitor: Monitor) -> None:
        self.checkpoints, self.world, self.monitor = checkpoints, world, monitor
        self.begun_step = self.saved_step = -1
        self.failure = ""
        self._failures = 0
        self._save: _Save | None = None

    def begin(self, engine: Engine, progress: Progress, origin: Origin, *, patient: bool = False) -> None:
        """Take the state as it is now, and start to write it.

        `patient`: wait for the save before this one however long it takes, not just PATIENCE.
        """
        began = time.perf_counter()
        if self._save is not None and not self._settle(None if patient else PATIENCE):
            self._left_out(progress.step)
            return
        self.begun_step = progress.step
        partial = self.checkpoints.folder / (tag_name(progress.step) + PARTIAL)
        save = _Save(progress.step, partial, began, None)
        if problem := self._on_main(lambda: self.checkpoints.make_room(partial)):
            self._failed(save, problem)
            return
        files = engine.masters.capture()
        record = {"progress": asdict(progress), "origin": asdict(origin)}
        index = statefiles.index(engine.masters.files()) if self.world.main else None
        save.job = _Job(lambda: self._write(partial, files, record, index))
        self._save = save
        self.monitor.write(progress.step, {"checkpoint/stall_seconds": time.perf_counter() - began})

    def advance(self) -> None:
        """See how far the save on its way has come; costs nothing when there is none."""
        save = self._save
        if save is None:
            return
        busy = save.job is not None and save.job.is_alive()
        if self.world.gather_numbers([busy]).any():
            return
        job, save.job = save.job, None
        problem, result = (job.problem, job.result) if job else (None, None)
        if found := self.world.problems(problem):
            self._save = None
            self._failed(save, found)
            return
        if save.finishing:
            self._save = None
            self._saved(save, result)
            return
        sums = {name: entry for part in self.world.gather(result) for name, entry in part.items()}
        save.finishing = True
        if self.world.main:
            save.job = _Job(lambda: self._finish(save.partial, sums))

    def wait(self) -> None:
        """Until the save on its way is on disk, or has failed."""
        self._settle(None)

    def close(self) -> None:
        """This rank alone, when training ends by an error: a file that is half written is finished."""
        if self._save is not None and self._save.job is not None:
            self._save.job.join(PATIENCE)

    def _settle(self, seconds: float | None) -> bool:
        """Wait for the save on its way; whether it is over."""
        end = None if seconds is None else time.monotonic() + seconds
        while self._save is not None:
            job, overdue = self._save.job, False
            if job is not None:
                job.join(None if end is None else max(0.0, end - time.monotonic()))
                overdue = job.is_alive()
            if self.world.gather_numbers([overdue]).any():
                return False
            self.advance()
        return True

    def _write(
        self, partial: Path, files: list[tuple[StateFile, list[Tensor]]], record: Any, index: Any
    ) -> Sums:
        """This rank's files; the main rank adds the record."""
        sums: Sums = {}
        for file, chunks in files:
            size, digest = statefiles.write(partial / file.name, file.header(), chunks, self.world.pulse.beat)
            sums[file.name] = {"bytes": size, "sha256": digest}
        if self.world.main:
            write_json(partial / TRAINER, record)
            if index:
                write_json(partial / statefiles.INDEX, index)
            for path in (partial / TRAINER, partial / statefiles.INDEX):
                if path.is_file():
                    sums[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        return sums

    def _finish(self, partial: Path, sums: Sums) -> str | None:
        """Main rank: make a tag of the written files. Returns why it could not be copied, if so."""
        for name, entry in sums.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != entry["bytes"]:
                raise OSError(
                    f"the main process does not see {name} as another wrote it: all hosts need one folder "
                    "for train.output"
                )
        write_json(partial / MANIFEST, {"files": sums})
        self.checkpoints.publish(partial)
        try:
            self.checkpoints.publish_copy(partial.name.removesuffix(PARTIAL), self.world.pulse.beat)
        except OSError as error:  # shutil.Error too
            return words(error)
        return None

    def _on_main(self, work: Callable[[], None]) -> str | None:
        """Let the main rank do something; what went wrong, on all ranks."""
        problem: OSError | None = None
        try:
            if self.world.main:
                work()
        except OSError as error:
            problem = error
        return self.world.problems(problem)

    def _saved(self, save: _Save, copy_problem: str | None) -> None:
        self.saved_step = save.step
        self.monitor.write(save.step, {"checkpoint/seconds": time.perf_counter() - save.began})
        if copy_problem:
            self.monitor.say(
                f"could not copy checkpoint {save.partial.stem} to {self.checkpoints.copy}: {copy_problem}; "
                "training goes on"
            )

    def _failed(self, save: _Save, problem: str) -> None:
        """Give the space back, and say what is left."""
        self._failures += 1
        newest: list[str] = []
        if self.world.main:
            shutil.rmtree(save.partial, ignore_errors=True)
            newest = tags_in(self.checkpoints.folder)[-1:]
        kept = f"the newest good checkpoint is {newest[0]}" if newest else "there is no earlier checkpoint"
        where = self.checkpoints.folder / save.partial.stem
        self.failure = f"could not write checkpoint {where}: {problem}; {kept}"
        self.monitor.say(f"{self.failure}; training goes on")
        self.monitor.write(save.step, {"checkpoint/failures": self._failures})

    def _left_out(self, step: int) -> None:
        assert self._save is not None
        self.begun_step = step
        self._failures += 1
        waited = time.perf_counter() - self._save.began
        self.failure = (
            f"the checkpoint of step {step} is left out: that of step {self._save.step} is still being "
            f"written after {waited:.0f} s, the disk is slow"
        )
        self.monitor.say(f"{self.failure}; training goes on")
        self.monitor.write(step, {"checkpoint/failures": self._failures})
