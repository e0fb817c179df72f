"""Starting a planned run: the last checks, then this process becomes the launcher.

DeepSpeed starts other hosts through pdsh, which runs ssh; what would go wrong there is found before.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import torch

from hybrid.errors import LaunchError

from .hosts import listed
from .plan import Plan

RESOLVE_SECONDS = 20.0
"""All names of a run must be found within this time."""
SSH_SECONDS = 25.0
"""A host that has not let us in by then is not used."""
SSH_AT_ONCE = 64
"""Hosts that are asked at the same time."""
SSH_OPTIONS = (
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=10",
    "-oServerAliveCountMax=3",
)
"""Without them pdsh waits for ever for a host whose power or cable is gone."""


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
        _check_ssh([host.name for host in plan.hosts])
    if plan.master is not None:
        require_addresses([plan.master])
        if node_rank in (None, 0):
            _refuse_busy_port(plan.master, plan.port)
    elif plan.port is not None:
        _refuse_busy_port("127.0.0.1", plan.port)
    print(command, flush=True)
    sys.stderr.flush()
    # Else a folder called hybrid, where the command is run, would be taken for the package.
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    if not torch.cuda.is_available():  # said, DeepSpeed does not warn that it found no GPU
        environment.setdefault("DS_ACCELERATOR", "cpu")
    if everywhere:
        given = environment.get("PDSH_SSH_ARGS_APPEND")
        environment["PDSH_SSH_ARGS_APPEND"] = " ".join([*([given] if given else []), *SSH_OPTIONS])
    if everywhere or plan.launcher == "slurm":
        os.execvpe(program, command.argv, environment)
    environment.pop("RANK", None)  # by it `supervise` knows the processes that the launcher starts
    os.execvpe(sys.executable, [sys.executable, "-m", "hybrid.launch.supervise", *command.argv], environment)


def _refuse_busy_port(name: str, port: int | None) -> None:
    """Raise LaunchError when `name` is this machine and something listens on the port already."""
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just given up is free
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            words = f"port {port} of {name} is busy, probably with another run: choose one with --master-port"
            raise LaunchError(words) from error


def require_addresses(names: Iterable[str], seconds: float = RESOLVE_SECONDS) -> None:
    """Raise LaunchError naming those that have no network address, after at most `seconds`."""
    problems: dict[str, str | None] = dict.fromkeys(names, f"no answer within {seconds:g} s")

    def look_up(name: str) -> None:
        try:
            socket.getaddrinfo(name, None)
            problems[name] = None
        except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is too long
            problems[name] = getattr(error, "strerror", None) or str(error)

    # Not a pool: its threads would be waited for, and a look-up cannot be stopped.
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in problems]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    missing = [f"{name} ({reason})" for name, reason in problems.items() if reason is not None]
    if missing:
        raise LaunchError(f"no network address is known for {listed(missing)}; nothing was launched")


def _check_ssh(hosts: Sequence[str]) -> None:
    """Raise LaunchError for what would fail when some hosts have started, or as a traceback.

    That is a program that is missing, a host that ssh does not reach, a folder that cannot be named in the
    command, and a line of `.deepspeed_env` that DeepSpeed cannot read.
    """
    for program in ("pdsh", "ssh"):
        if shutil.which(program) is None:
            raise LaunchError(
                f"DeepSpeed starts other hosts through {program}, which is not installed here: install it or "
                f"run this on each host with --node-rank 0 to {len(hosts) - 1}, which needs no ssh"
            )
    for what, path in (("this folder", os.getcwd()), ("Python", sys.executable)):
        if shlex.quote(path) != path or "%" in path:
            raise LaunchError(
                f"the path of {what} is {path!r}, which DeepSpeed cannot pass through ssh; allowed are "
                "letters, digits and _@+=:,./- (or run this on each host with --node-rank)"
            )
    _check_deepspeed_env()
    with ThreadPoolExecutor(SSH_AT_ONCE) as pool:
        answers = dict(zip(hosts, pool.map(_trouble, hosts), strict=True))
    missing = [f"{host} ({trouble})" for host, trouble in answers.items() if trouble]
    if missing:
        raise LaunchError(f"ssh does not get into {listed(missing)}; nothing was launched")


def _check_deepspeed_env() -> None:
    for folder in (Path.home(), Path()):
        path = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text("utf-8", "surrogateescape").splitlines(), 1):
            if not re.fullmatch(r"\s*[A-Za-z_]\w*\s*=[^\ud800-\udfff]*", line):
                raise LaunchError(
                    f"{path}, line {number}: {line!r}: expected NAME=VALUE in UTF-8; nothing was launched"
                )


def _trouble(host: str) -> str:
    """Say why pdsh's ssh can run no command on a host; empty when it can."""
    user = pwd.getpwuid(os.getuid()).pw_name
    command = ["ssh", *SSH_OPTIONS, "-l", user, host, "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SSH_SECONDS:g} s"
    said = done.stderr.strip().splitlines()
    return (said[-1] if said else f"code {done.returncode}") if done.returncode else ""
