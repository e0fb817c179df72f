"""Starting a planned run: the last checks, then this process becomes the launcher."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from typing import NoReturn

from hybrid.errors import LaunchError

from . import ssh
from .hosts import require_addresses
from .plan import Plan


def start(plan: Plan, node_rank: int | None) -> NoReturn:
    """Replace this process by the launcher of one node (`node_rank`) or of all, or by what stands over one.

    The exit code is the launcher's. SIGTERM makes the processes of this machine save and end (`supervise`);
    over pdsh DeepSpeed passes it on to all hosts, and ends with 1.

    Raises LaunchError, before anything was started, for a program that is missing, a master without address,
    a busy port, and a host that ssh does not reach.
    """
    command = plan.command(node_rank)
    program = command.argv[0]
    if shutil.which(program) is None:
        raise LaunchError(f"there is no command {program} here, which the {plan.launcher} launcher needs")
    everywhere = node_rank is None and plan.launcher == "deepspeed" and plan.master is not None
    if everywhere:
        ssh.check([host.name for host in plan.hosts])
    if plan.master is not None:
        require_addresses([plan.master])
        if node_rank in (None, 0):
            _refuse_busy_port(plan.master, plan.port)
    elif plan.port is not None:
        _refuse_busy_port("127.0.0.1", plan.port)
    print(command, flush=True)
    sys.stderr.flush()
    # Else a folder called hybrid, where the command is run, would be taken for the package.
    environment = os.environ | {"PYTHONSAFEPATH": "1"} | _accelerator()
    environment |= ssh.variables() if everywhere else {}
    if everywhere or plan.launcher == "slurm":
        os.execvpe(program, command.argv, environment)
    environment.pop("RANK", None)  # by it `supervise` knows the processes that the launcher starts
    os.execvpe(sys.executable, [sys.executable, "-m", "hybrid.launch.supervise", *command.argv], environment)


def _refuse_busy_port(name: str, port: int | None) -> None:
    """LaunchError when `name` is this machine and something listens on the port already."""
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just given up is free
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            words = f"port {port} of {name} is busy, probably with another run: choose one with --master-port"
            raise LaunchError(words) from error


def _accelerator() -> dict[str, str]:
    """Said, DeepSpeed does not warn that it found no GPU."""
    import torch

    return {} if torch.cuda.is_available() or "DS_ACCELERATOR" in os.environ else {"DS_ACCELERATOR": "cpu"}
