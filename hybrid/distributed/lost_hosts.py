"""Noticing that another machine of the run is gone when nothing says so: power, cable, network.

gloo and NCCL wait half an hour for an answer that cannot come. So the first process of every other node holds
a TCP connection to rank 0 on which nothing is sent. The kernels keep it alive, also those of machines whose
processes are busy or stopped, and end it when the other machine is silent. A process whose connection ends
without a goodbye ends too, which ends all others. Within one machine the launcher watches over them.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from hybrid.errors import LOST_EXIT_CODE, LostError, TrainError

from .world import World

SILENT_SECONDS = 24
"""A machine that does not answer for so long is gone."""
GRACE_SECONDS = 6.0
"""For the process to end by itself, by the error that its collectives may have, before it is ended."""
_GOODBYE = b"."
_LOST = re.compile(r"gloo|NCCL|[Cc]onnection (reset|closed|refused)|Broken pipe")


@contextmanager
def lost_peers_in_words() -> Iterator[None]:
    """Turn what the backends say when another process of the run is gone into a LostError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
            raise
        raise LostError(
            "lost the connection to another process of this run, which ended or cannot be reached; its own "
            "messages say why. The same command goes on from the newest checkpoint "
            f"({str(error).splitlines()[0][:200]})"
        ) from error


@contextmanager
def keepalive(world: World) -> Iterator[None]:
    """Hold this process' connections while the block runs; no goodbye is said when an error ends it.

    Raises TrainError when rank 0 cannot be reached.
    """
    if world.size == world.local_size:
        yield
        return
    peers, listener = _Peers(), None
    if world.main:
        ipv6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ipv6 else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=ipv6, backlog=4096)
    port = world.gather(listener.getsockname()[1] if listener else 0)[0]
    if listener is not None:
        threading.Thread(target=peers.accept, args=(listener,), name="keepalive", daemon=True).start()
    elif world.local_rank == 0:
        peers.watch(_connection(os.environ["MASTER_ADDR"], port))
    try:
        yield
    except SystemExit:
        peers.say_goodbye()
        raise
    peers.say_goodbye()


class _Peers:
    """The connections of this process, and a thread for each that waits for its end."""

    def __init__(self) -> None:
        self._connections: list[socket.socket] = []
        self._over = False

    def accept(self, listener: socket.socket) -> None:
        """Watch every connection that is made."""
        while True:
            self.watch(listener.accept()[0])

    def watch(self, connection: socket.socket) -> None:
        """End the process when a connection ends without a goodbye."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 6)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        self._connections.append(connection)
        threading.Thread(target=self._wait, args=(connection,), name="keepalive", daemon=True).start()

    def say_goodbye(self) -> None:
        """Tell the other ends that this one ends well."""
        self._over = True
        for connection in self._connections:
            with suppress(OSError):  # whose other end has gone
                connection.send(_GOODBYE)

    def _wait(self, connection: socket.socket) -> None:
        try:
            reason = "" if connection.recv(1) == _GOODBYE else "its processes ended"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason and not self._over:
            _end_process(reason)


def _connection(address: str, port: int) -> socket.socket:
    try:
        made = socket.create_connection((address, port), timeout=SILENT_SECONDS)
    except OSError as error:
        raise TrainError(f"cannot connect to {address}:{port}, where rank 0 listens: {error}") from error
    made.settimeout(None)
    return made


def _end_process(reason: str) -> None:
    """End this process, whose main thread may wait in a collective, where no exception reaches it."""
    time.sleep(GRACE_SECONDS)
    text = (
        f"hybrid: error (rank {os.environ['RANK']}): lost the connection to another process of this run, on "
        f"another machine ({reason}). The same command goes on from the newest checkpoint\n"
    )
    os.write(2, text.encode())  # not through sys.stderr, whose lock another thread may hold
    os._exit(LOST_EXIT_CODE)
