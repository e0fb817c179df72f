"""pdsh and ssh from host to host of a `Network`: the real ones, or stand-ins that do what those do."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .namespaces import Network

PROGRAMS = ("pdsh", "ssh", "sshd", "ssh-keygen")

# As pdsh's src/modules/sshcmd.c and src/common/pipecmd.c have it; -S: the highest code of all hosts.
PDSH = """#!{python}
import os, re, subprocess, sys, threading
assert sys.argv[1:4] == ["-S", "-f", "1024"] and sys.argv[4] == "-w", sys.argv
hosts, command = sys.argv[5].split(","), " ".join(sys.argv[6:])
def start(rank, host):
    values = {{"h": host, "n": str(rank), "u": "root", "%": "%"}}
    words = ["-2", "-a", "-x", "-l%u", "%h", *os.environ["PDSH_SSH_ARGS_APPEND"].split(), command]
    words = [re.sub("%([hnu%])", lambda found: values[found[1]], word) for word in words]
    return subprocess.Popen(["ssh", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
def read(host, process):
    for line in process.stdout:
        sys.stdout.write(f"{{host}}: {{line}}")
        sys.stdout.flush()
running = [start(rank, host) for rank, host in enumerate(hosts)]
readers = [threading.Thread(target=read, args=pair) for pair in zip(hosts, running)]
for reader in readers: reader.start()
for reader in readers: reader.join()
sys.exit(max(process.wait() for process in running))
"""

# Options before the host and after it, then a command for the shell of a new login.
SSH = """#!/usr/bin/env bash
options() {{ # how many words of options come first
    n=0
    while [[ $1 == -* ]]; do case $1 in -l | -o) n=$((n + 2)); shift 2 ;; *) n=$((n + 1)); shift ;; esac; done
}}
options "$@"; shift $n
case $1 in {cases} *) echo "ssh: Could not resolve hostname $1" >&2; exit 255 ;; esac
shift; options "$@"; shift $n
exec ip netns exec "$name" env -i HOME=/root USER=root PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin sh -c "$*"
"""

SSHD_CONFIG = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
SSH_CONFIG = """
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile {folder}/known_hosts
LogLevel ERROR
"""


def missing() -> list[str]:
    """Programs of the real ones that are not here."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextlib.contextmanager
def stand_ins(net: Network, folder: Path) -> Iterator[Path]:
    """A folder for PATH with pdsh and ssh, while the block runs."""
    pairs = zip(net.addresses, net.names, strict=True)
    cases = " ".join(f"{address}) name={name} ;;" for address, name in pairs)
    yield _programs(folder, pdsh=PDSH.format(python=sys.executable), ssh=SSH.format(cases=cases))


@contextlib.contextmanager
def real_ones(net: Network, folder: Path) -> Iterator[Path]:
    """The same with an sshd on every host, keys of its own, and an ssh that knows them."""
    for key in ("key", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in
    daemon, client = _find("sshd"), _find("ssh")
    assert daemon is not None
    with contextlib.ExitStack() as stack:
        for host in range(len(net.names)):
            command = net.on(host, [daemon, "-D", "-e", "-f", str(folder / "sshd_config")])
            with (folder / f"sshd_{host}.log").open("w") as log:
                process = stack.enter_context(subprocess.Popen(command, stderr=log))
            stack.callback(process.terminate)
        yield _programs(folder, ssh=f'#!/bin/sh\nexec {client} -F {folder}/ssh_config "$@"\n')


def _programs(folder: Path, **texts: str) -> Path:
    found = folder / "bin"
    found.mkdir()
    for name, text in texts.items():
        (found / name).write_text(text)
        (found / name).chmod(0o755)
    return found
