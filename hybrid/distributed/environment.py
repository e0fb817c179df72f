"""What a launcher tells a process through its environment. Light: nothing here imports torch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hybrid.errors import TrainError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def number(name: str, default: int | None = None, *, least: int = 0, below: int | None = None) -> int:
    """Read a whole number from an environment variable, from `least` and `below` a limit; else TrainError."""
    text = os.environ.get(name)
    if not text and default is not None:
        return default
    try:
        value = int(text or "")
    except ValueError:
        value = least - 1
    if value < least or (below is not None and value >= below):
        limit = "" if below is None else f" and below {below}"
        raise TrainError(
            f"the environment variable {name} is {text!r}; allowed: whole numbers of {least} or more{limit} "
            "(launchers set it: unset it to train with one process)"
        )
    return value


def set_single_process() -> None:
    """Set the launcher's variables where no launcher did; TrainError when one set only some of them."""
    present = [name for name in LAUNCHER_VARIABLES if os.environ.get(name)]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
        )  # fmt: skip
    elif missing := [name for name in LAUNCHER_VARIABLES if name not in present]:
        raise TrainError(
            f"the environment names {', '.join(present)} but not {', '.join(missing)}: start the "
            "processes with `deepspeed --module hybrid train` or `torchrun -m hybrid train`, or unset "
            "them"
        )


def default_threads(local_size: int, launcher: Path | None = None) -> int | None:
    """Choose the CPU threads of each of `local_size` processes here; None leaves it to torch.

    A number that the user set stays (torchrun, whose folder in /proc is `launcher`, the parent's by default,
    sets 1 by itself), and cores that a scheduler bound this
    process to are its own. Those of the whole machine, those that a launcher started here handed on to all
    its processes, and what a control group allows, are shared.
    """
    told = os.environ.get("OMP_NUM_THREADS")
    if told and not (told == "1" and _set_by_torchrun(launcher)):
        return None
    cores = len(os.sched_getaffinity(0))
    handed_on = "TORCHELASTIC_RUN_ID" in os.environ or "CROSS_SIZE" in os.environ  # torchrun; deepspeed
    bound = cores != os.cpu_count() and not handed_on
    mine = cores if bound else max(1, cores // local_size)
    quota = cpu_quota()
    allowed = mine if quota is None else min(mine, max(1, int(quota / local_size)))
    return None if local_size == 1 and allowed == cores else allowed


def _set_by_torchrun(launcher: Path | None) -> bool:
    """Tell whether torchrun set OMP_NUM_THREADS, which it was started without (or that cannot be read)."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    try:
        started_with = ((launcher or Path(f"/proc/{os.getppid()}")) / "environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in started_with)


def cpu_quota(
    groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Read how many cores' time this process' control groups (version 1 or 2) allow it; None for no limit."""
    found = []
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, fields = line.partition(":")
        controllers, colon, name = fields.partition(":")
        if not colon or (controllers and "cpu" not in controllers.split(",")):
            continue
        for root in (
            (mounted / controllers, mounted / "cpu") if controllers else (mounted, mounted / "unified")
        ):
            folder = root / name.lstrip("/")
            for place in (folder, *folder.parents):
                if place.is_relative_to(root):
                    found += _quota_of(place)
    return min(found, default=None)


def _quota_of(folder: Path) -> list[float]:
    """Read the limit in one control group's folder, if it has one."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return [float(quota) / float(period)] if quota != "max" and float(quota) > 0 else []
    except (OSError, ValueError, ZeroDivisionError):
        return []


def free_port() -> int:
    """Find a TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
