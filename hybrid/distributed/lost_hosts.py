"""Noticing that another machine of the run is gone when nothing says so: power, cable, network.

gloo and NCCL wait half an hour for an answer that cannot come. So the first process of every other node holds
a TCP connection to rank 0 on which nothing is sent. The kernels keep it alive, also those of machines whose
processes are busy or stopped, and end it when the other machine is silent. A process whose connection ends
without a goodbye ends too, which ends all others. Within one machine the launcher watches over them.
"""

from __future__ import annotations

import os
import re
import selectors
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
    listener = _listener() if world.main else None
    port = world.gather(listener.getsockname()[1] if listener else 0)[0]
    held = None
    if listener is not None:
        held = _Connections(listener)
    elif world.local_rank == 0:
        held = _Connections(_connection(os.environ["MASTER_ADDR"], port))
    try:
        yield
    except SystemExit:
        raise
    except BaseException:
        held = None
        raise
    finally:
        if held is not None:
            held.close()


class _Connections:
    """A thread that waits for what happens to some connections, or to a listener's."""

    def __init__(self, first: socket.socket) -> None:
        self._inbox, self._outbox = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for one in (self._inbox, first):
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="keepalive", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye on every connection."""
        self._outbox.send(_GOODBYE)
        self._thread.join()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                found = key.fileobj
                assert isinstance(found, socket.socket)
                if found is self._inbox:
                    self._say_goodbye()
                    return
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._selector.register(_kept_alive(found.accept()[0]), selectors.EVENT_READ)
                elif reason := _end(found):
                    _end_process(reason)
                else:
                    self._selector.unregister(found)
                    found.close()

    def _say_goodbye(self) -> None:
        for key in list(self._selector.get_map().values()):
            found = key.fileobj
            assert isinstance(found, socket.socket)
            with suppress(OSError):  # one that listens, or whose other end has gone
                found.send(_GOODBYE)
            found.close()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _connection(address: str, port: int) -> socket.socket:
    try:
        made = socket.create_connection((address, port), timeout=SILENT_SECONDS)
    except OSError as error:
        raise TrainError(f"cannot connect to {address}:{port}, where rank 0 listens: {error}") from error
    made.settimeout(None)
    return _kept_alive(made)


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return connection


def _end(connection: socket.socket) -> str:
    """Say why a connection with news ended; empty after a goodbye."""
    try:
        return "" if connection.recv(1) == _GOODBYE else "its processes ended"
    except OSError as error:
        return error.strerror or str(error)


def _end_process(reason: str) -> None:
    """End this process, whose main thread may wait in a collective, where no exception reaches it."""
    time.sleep(GRACE_SECONDS)
    text = (
        f"hybrid: error (rank {os.environ['RANK']}): lost the connection to another process of this run, on "
        f"another machine ({reason}). The same command goes on from the newest checkpoint\n"
    )
    os.write(2, text.encode())  # not through sys.stderr, whose lock another thread may hold
    os._exit(LOST_EXIT_CODE)
