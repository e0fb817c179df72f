"""What a run tells while it trains: metrics.jsonl, TensorBoard events and the progress line.

Only the main rank writes. metrics.jsonl is append-only, one JSON object a line with `step`, `run` (one id
per start of the command) and values under the same names as in TensorBoard; after resuming an older step
both versions of a step stay there, and `read_metrics` gives the later one. TensorBoard's files are cut back
to the resumed step, so that a curve has one value per step whatever reads it.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from hybrid.errors import words
from hybrid.recipe.schema import MonitorSection

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PEAK_TFLOPS = {
    ("H200", "bf16"): 989.0, ("H100", "bf16"): 989.0, ("A100", "bf16"): 312.0, ("L40S", "bf16"): 362.0,
    ("A10", "bf16"): 125.0, ("4090", "bf16"): 165.0, ("V100", "fp32"): 15.7, ("H200", "fp32"): 67.0,
    ("H100", "fp32"): 67.0, ("A100", "fp32"): 19.5, ("L40S", "fp32"): 91.6, ("A10", "fp32"): 31.2,
    ("4090", "fp32"): 82.6,
}  # fmt: skip
"""Dense peaks from the vendors' data sheets (TFLOP/s, without sparsity; fp32 without TF32)."""


class Monitor:
    """The run's writer; on ranks other than the main one every method does nothing."""

    def __init__(self, folder: Path, section: MonitorSection, main: bool, step: int) -> None:
        """`step` is the last finished step: what the files hold beyond it was of an abandoned attempt."""
        self.run = uuid.uuid4().hex[:8]
        self._disk_failed = False
        self._metrics: TextIO | None = None
        self._events: SummaryWriter | None = None
        if not main:
            return
        cut = _is_cut(folder / "metrics.jsonl")
        self._metrics = open(folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        if cut:
            self._metrics.write("\n")
        if section.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            cut_events(folder / "tensorboard", step)
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
        """A line for the terminal."""
        if self._metrics is not None:
            print(text, file=sys.stdout, flush=True)

    def flush(self) -> None:
        """Bring everything written so far to disk, so that a checkpoint never is ahead of its curves."""
        if self._metrics is not None:
            with self._surviving():
                os.fsync(self._metrics.fileno())
            if self._events is not None:
                with self._surviving():
                    self._events.flush()

    def close(self) -> None:
        if self._metrics is not None:
            self.flush()
            with self._surviving():
                self._metrics.close()
            if self._events is not None:
                with self._surviving():
                    self._events.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """A full disk costs curves, not the training: said once."""
        try:
            yield
        except OSError as error:
            if not self._disk_failed:
                self.say(f"could not write what is logged: {words(error)}; training goes on without")
            self._disk_failed = True


def _is_cut(path: Path) -> bool:
    """Whether a file's last line was left unfinished, by a crash."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def cut_events(folder: Path, step: int) -> None:
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
        shorter = path.with_name(f"{path.name}.tmp")
        with open(shorter, "wb") as file:
            writer = RecordWriter(file)
            for event in kept:
                writer.write(event.SerializeToString())
            writer.flush()
        os.replace(shorter, path)


def read_metrics(run: Path | str, *, every_run: bool = False) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl by step, those of one step merged into one dict.

    Where a step was trained twice (resumed from before it) the later run's values stand; `every_run` gives
    one dict per step and run instead. Lines cut off by a crash are left out.
    """
    merged: dict[Any, dict[str, Any]] = {}
    for line in Path(run, "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            values = json.loads(line)
            key = (values["step"], values["run"]) if every_run else values["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if key in merged and merged[key]["run"] != values["run"]:
            del merged[key]
        merged.setdefault(key, {}).update(values)
    return [merged[key] for key in sorted(merged)]


def memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: of the GPU's, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def peak_flops(section: MonitorSection, device: torch.device, precision: str) -> float | None:
    """FLOP/s one process' device can do at most; None for a GPU the table lacks.

    A CPU's is measured by a matrix product with this process' threads, in a fifth of a second.
    """
    if section.peak_tflops is not None:
        return section.peak_tflops * 1e12
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for (part, kind), peak in PEAK_TFLOPS.items() if part in name and kind == precision]
        return known[0] * 1e12 if known else None
    size, best = 512, math.inf
    a = torch.ones(size, size)
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        begin = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
