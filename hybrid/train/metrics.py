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
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybrid.errors import words
from hybrid.files import AppendedFile, replacing
from hybrid.recipe.schema import MonitorSection

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Texts in metrics.jsonl for what JSON has no number for; files of older versions have null."""
RENAMED = {"train/gradient_norm": "train/gradient_norm_before_clipping"}
"""Names in files of older versions -> today's."""


class Metrics:
    """Writes a run's metrics; on ranks other than the main one every method does nothing."""

    def __init__(self, folder: Path, section: MonitorSection, main: bool, step: int) -> None:
        """`step` is the last finished step: what the files hold beyond it was of an abandoned attempt."""
        self.run = uuid.uuid4().hex[:8]
        self._disk_failed = False
        self._events: EventFile | None = None
        self._files: list[AppendedFile] = []
        if not main:
            return
        path = folder / "metrics.jsonl"
        self._files.append(AppendedFile(path))
        if path.read_bytes()[-1:] not in (b"", b"\n"):  # the last line was left unfinished, by a crash
            self._files[0].write(b"\n")
        if section.tensorboard:
            drop_events(folder / "tensorboard", step)
            self._events = EventFile(folder / "tensorboard")
            self._files.append(self._events.file)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record values of `step`; names are `group/name`. Not finite ones are strings in the JSON."""
        if not self._files:
            return
        strict = {name: x if math.isfinite(x) else json.dumps(x) for name, x in values.items()}
        line = {"step": step, "run": self.run, "time": round(time.time(), 3), **strict}
        self._files[0].write(json.dumps(line, allow_nan=False).encode() + b"\n")
        if self._events is not None:
            self._events.write(step, values)
        self.flush(sync=False)

    def say(self, text: str) -> None:
        """Print a line on the terminal."""
        if self._files:
            with self._surviving():
                print(text, flush=True)

    def flush(self, *, sync: bool = True) -> None:
        """Bring everything written so far to disk, so that a checkpoint never is ahead of its curves."""
        for file in self._files:
            with self._surviving():
                file.flush(sync=sync)

    def close(self) -> None:
        """Flush and close the files."""
        self.flush()
        for file in self._files:
            with self._surviving():
                file.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Go on when the disk is full, which costs curves, not the training: told once."""
        try:
            yield
        except BrokenPipeError:  # nobody reads the terminal's text any more, as in `hybrid train | head`
            raise
        except OSError as error:
            if not self._disk_failed:
                self._disk_failed = True
                text = f"could not write what is logged: {words(error)}; training goes on without"
                with suppress(OSError):
                    print(text, file=sys.stderr, flush=True)


class EventFile:
    """Writes scalars for TensorBoard, in this thread: its own writer's ends in a traceback on a full disk."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        place = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        self.file = AppendedFile(folder / f"events.out.tfevents.{time.time():.0f}.{place}")
        self._records = RecordWriter(self.file)
        self._event = Event
        self._add(file_version="brain.Event:2")

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record values of `step`, which are on disk after the file's next flush."""
        self._add(step=step, summary={"value": [{"tag": n, "simple_value": v} for n, v in values.items()]})

    def _add(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


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
            values = {RENAMED.get(name, name): _number(value) for name, value in json.loads(line).items()}
            key = (values["step"], values["run"]) if every_run else values["step"]
        except (ValueError, KeyError, AttributeError):
            continue
        again = any(name.startswith("train/") for name in values)  # else it was only scored or saved again
        if again and key in merged and merged[key].get("run") != values.get("run"):
            del merged[key]
        merged.setdefault(key, {}).update(values)
    return [merged[key] for key in sorted(merged)]


def _number(value: Any) -> Any:
    return float(value) if value in NOT_FINITE else value
