"""Hosts of a network that are namespaces of this machine: their own addresses and cables, the same files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "eth0"


def reason_to_skip() -> str:
    """What is missing here; empty when nothing is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (the command ip)"
    probe = f"hy{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    links = ["ip", "-n", probe, "link", "add"]
    tried = subprocess.run([*links, "br0", "type", "bridge"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"no bridge in a network namespace: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """`count` hosts at one switch, which is a namespace of its own."""

    def __init__(self, count: int) -> None:
        base = f"hy{os.getpid()}"
        self._switch = f"{base}s"
        self.names = [f"{base}h{host}" for host in range(count)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(count)]

    def make(self) -> None:
        for name in (self._switch, *self.names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            ends = ["type", "veth", "peer", "name", INTERFACE, "netns", name]
            _ip("-n", self._switch, "link", "add", f"port{host}", *ends)
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")

    def on(self, host: int, command: list[str]) -> list[str]:
        """The command, to be run on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self, host: int) -> None:
        """Take the host's cable out: nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def kill(self, host: int) -> None:
        """Take the host's power: nobody is told, and nothing of it goes on."""
        self.cut(host)
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, host: int) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def described(self) -> list[str]:
        """Every process that is left, with its host."""
        found = []
        for host in range(len(self.names)):
            for pid in self.processes(host):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"host {host}: {command}")
        return found

    def remove(self) -> None:
        for host in range(len(self.names)):
            self.kill(host)
        for name in (*self.names, self._switch):
            _ip("netns", "del", name)


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    made = Network(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
