"""Starting other hosts through DeepSpeed, pdsh and ssh: what goes wrong there is found or put right before.

DeepSpeed hands one command line to pdsh, pdsh replaces %h, %u, %n and %% in it and gives it to ssh, and a
shell on each host takes it apart again. DeepSpeed protects only spaces and double quotes.
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybrid.errors import LaunchError

from .hosts import listed

ANSWER_SECONDS = 25.0
"""A host that has not let us in by then is not used."""
AT_ONCE = 64
"""Hosts that are asked at the same time."""
_OPTIONS = ("-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=10", "-oServerAliveCountMax=3")


def quoted(argument: str) -> str:
    """An argument of the command on the hosts, so written that it arrives there as it is."""
    argument = argument.replace("%", "%%")
    if " " in argument:  # DeepSpeed puts it between double quotes
        return re.sub(r"[\\$`]", r"\\\g<0>", argument)
    return shlex.quote(argument)


def variables() -> dict[str, str]:
    """For pdsh's environment. Without them pdsh waits for ever for a host whose power or cable is gone."""
    given = os.environ.get("PDSH_SSH_ARGS_APPEND")
    return {"PDSH_SSH_ARGS_APPEND": " ".join([*([given] if given else []), *_OPTIONS])}


def check(hosts: Sequence[str]) -> None:
    """LaunchError for what would fail when some hosts have started, or as a traceback: a program that is
    missing, a host that ssh does not reach, a folder that cannot be named in the command, a line of
    `.deepspeed_env` that DeepSpeed cannot read."""
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
    _check_variables_for_hosts()
    _require_answers(hosts)


def _check_variables_for_hosts() -> None:
    for folder in (Path.home(), Path()):
        path = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not re.match(r"\s*[A-Za-z_]\w*\s*=", line):
                raise LaunchError(
                    f"{path}, line {number}: {line!r}: expected NAME=VALUE; nothing was launched"
                )


def _require_answers(hosts: Sequence[str]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(hosts, pool.map(_trouble, hosts), strict=True))
    missing = [f"{host} ({trouble})" for host, trouble in answers.items() if trouble]
    if missing:
        raise LaunchError(f"ssh does not get into {listed(missing)}; nothing was launched")


def _trouble(host: str) -> str:
    """Why no command can be run on a host by pdsh's ssh; empty when one can."""
    user = pwd.getpwuid(os.getuid()).pw_name
    command = ["ssh", *_OPTIONS, "-l", user, host, "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_SECONDS:g} s"
    said = done.stderr.strip().splitlines()
    return (said[-1] if said else f"code {done.returncode}") if done.returncode else ""
