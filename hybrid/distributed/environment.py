"""What a launcher tells a process through its environment. Light: nothing here imports torch."""

from __future__ import annotations

import os
import socket

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


def free_port() -> int:
    """Find a TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
