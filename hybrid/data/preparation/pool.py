"""Worker processes of one preparation."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .shards import Unit, unit_to_json

SAY_EVERY = 10  # seconds


class Pool:
    """Worker processes, each fed by a thread that hands it one unit after the other, largest first."""

    def __init__(
        self,
        folder: Path,
        sections: dict[str, SourceSection],
        units: list[Unit],
        say: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.sections = sections
        self.waiting = sorted(units, key=lambda unit: unit.size)
        self.say, self.total, self.done, self.said = say, len(units), 0, time.monotonic()
        self.errors: list[DataError] = []
        self.workers: list[subprocess.Popen[str]] = []

    def run(self, processes: int) -> None:
        """Raises DataError when a worker refuses its unit or dies."""
        # -P: where the command is run there may be a folder called hybrid.
        command = [sys.executable, "-P", "-m", "hybrid.data.preparation.worker", str(self.folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            for _ in range(processes):
                pipe = subprocess.PIPE
                self.workers.append(
                    subprocess.Popen(
                        command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=environment
                    )
                )
            threads = [threading.Thread(target=self._feed, args=(worker,)) for worker in self.workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for worker in self.workers:
                worker.kill()
                worker.wait()
        if self.errors:
            raise self.errors[0]

    def _count(self) -> None:
        self.done += 1
        if time.monotonic() - self.said > SAY_EVERY:
            self.said = time.monotonic()
            self.say(f"{self.done} of {self.total} shards made")

    def _feed(self, worker: subprocess.Popen[str]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while not self.errors:
            try:
                unit = self.waiting.pop()
            except IndexError:
                return
            job = {"unit": unit_to_json(unit), "section": plain_section(self.sections[unit.source])}
            try:
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
            except OSError:
                line = ""
            answer = json.loads(line) if line else {"failed": f"the process ended (status {_status(worker)})"}
            if "refused" in answer:
                self.errors.append(DataError(answer["refused"]))
            elif "failed" in answer:
                self.errors.append(
                    DataError(f"preparing {unit.source}/{unit.name} failed: {answer['failed']}")
                )
            else:
                self._count()


def _status(worker: subprocess.Popen[str]) -> int | None:
    """Of a worker whose output ended: its exit may be a moment behind."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(10)
    return worker.returncode


def plain_section(section: SourceSection) -> dict[str, Any]:
    """The section as plain values (a recipe may hold OmegaConf's own lists)."""
    values = {key: getattr(section, key) for key in SourceSection.__dataclass_fields__}
    return {**values, "paths": list(section.paths)}
