"""What a run records and says while it trains: metrics.jsonl, TensorBoard events and lines for the terminal.

Only the main rank writes. metrics.jsonl is append-only, one JSON object a line with `step`, `run` (one id
per start of the command) and values under the same names as in TensorBoard; after resuming an older step
both versions of a step stay there, and `read_metrics` gives the later one. TensorBoard's files lose what is
beyond the resumed step, so that a curve has one value per step whatever reads it.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hybrid.errors import words
from hybrid.files import no_link, replacing
from hybrid.recipe.schema import MonitorSection

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """Writes a run's metrics; on ranks other than the main one every method does nothing."""

    def __init__(self, folder: Path, section: MonitorSection, main: bool, step: int) -> None:
        """`step` is the last finished step: what the files hold beyond it was of an abandoned attempt."""
        self.run = uuid.uuid4().hex[:8]
        self._disk_failed = False
        self._metrics: TextIO | None = None
        self._events: SummaryWriter | None = None
        if not main:
            return
        truncated = _is_truncated(folder / "metrics.jsonl")
        path = folder / "metrics.jsonl"
        self._metrics = open(path, "a", encoding="utf-8", opener=no_link)  # noqa: SIM115 (closed by close)
        if truncated:
            self._metrics.write("\n")
        if section.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            drop_events(folder / "tensorboard", step)
            self._events = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record values of `step`; names are `group/name`. Not finite ones are null in the JSON."""
        if self._metrics is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "run": self.run, "time": round(time.time(), 3), **finite})
        with self._surviving():
            self._metrics.write(line + "\n")
            self._metrics.flush()
        if self._events is not None:
            with self._surviving():
                for name, value in values.items():
                    self._events.add_scalar(name, value, step)

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        if self._metrics is not None:
            print(text, flush=True)

    def flush(self) -> None:
        """Bring everything written so far to disk, so that a checkpoint never is ahead of its curves."""
        if self._metrics is not None:
            with self._surviving():
                os.fsync(self._metrics.fileno())
        if self._events is not None:
            with self._surviving():
                self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        for file in (self._metrics, self._events):
            with self._surviving():
                if file is not None:
                    file.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Go on when the disk is full, which costs curves, not the training: said once."""
        try:
            yield
        except OSError as error:
            if not self._disk_failed:
                self.say(f"could not write what is logged: {words(error)}; training goes on without")
            self._disk_failed = True


def _is_truncated(path: Path) -> bool:
    """Tell whether a file's last line was left unfinished, by a crash."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def drop_events(folder: Path, step: int) -> None:
    """Drop events after `step` from the TensorBoard files in `folder`."""
    if not folder.is_dir():
        return
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    for path in sorted(folder.glob("events.out.tfevents.*")):
        events = list(EventFileLoader(str(path)).Load())
        kept = [event for event in events if event.step <= step]
        if len(kept) == len(events):
            continue
        with replacing(path) as file:
            writer = RecordWriter(file)
            for event in kept:
                writer.write(event.SerializeToString())
            writer.flush()


def read_metrics(run: Path | str, *, every_run: bool = False) -> list[dict[str, Any]]:
    """Read the lines of a run's metrics.jsonl by step, those of one step merged into one dict.

    Where a step was trained twice (resumed from before it) the later run's values stand; `every_run` gives
    one dict per step and run instead. Lines that a crash left unfinished are left out.
    """
    merged: dict[Any, dict[str, Any]] = {}
    for line in Path(run, "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            values = json.loads(line)
            key = (values["step"], values["run"]) if every_run else values["step"]
        except (ValueError, KeyError, TypeError):
            continue
        again = any(name.startswith("train/") for name in values)  # else it was only scored or saved again
        if again and key in merged and merged[key]["run"] != values["run"]:
            del merged[key]
        merged.setdefault(key, {}).update(values)
    return [merged[key] for key in sorted(merged)]
