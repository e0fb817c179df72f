"""Signals that ask a run to save."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from hybrid.errors import STOPPED_EXIT_CODE


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process with STOPPED_EXIT_CODE on SIGTERM, while the block runs and no `Signals` are active:
    there is nothing to save while it imports or waits for the others.

    Python calls a handler only between two of its own instructions, which may be minutes away; the number of
    the signal is written to a file at once, and a thread waits for it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(_number: int, _frame: FrameType | None) -> None:
        pass

    def end(inbox: socket.socket) -> None:
        while number := inbox.recv(1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is handler:
                text = b"hybrid: stopped by SIGTERM outside training; the same command goes on\n"
                with suppress(OSError):
                    os.write(errors, text)
                os._exit(STOPPED_EXIT_CODE)

    try:
        errors = os.dup(2)  # DeepSpeed turns 2 away while it tries a compiler
    except OSError:  # closed by who started us
        errors = os.open(os.devnull, os.O_WRONLY)
    inbox, outbox = socket.socketpair()
    outbox.setblocking(False)
    threading.Thread(target=end, args=(inbox,), name="signals", daemon=True).start()
    handler_before = signal.signal(signal.SIGTERM, handler)
    file_before = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(file_before)
        signal.signal(signal.SIGTERM, handler_before)
        outbox.close()
        os.close(errors)


class Signals:
    """While active, SIGTERM (save and stop) and SIGUSR1 (save and go on) only leave a note.

    A signal reaches one rank; the ranks exchange the notes after every step, so all act together.
    """

    def __init__(self) -> None:
        self.at_once = False
        """SIGTERM ends the process instead: for work that loses nothing by it and may be long."""
        self.stop = False
        self.save = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
            return
        self.stop = True
        if self.at_once:
            print("hybrid: stopped by SIGTERM before training; the same command goes on", file=sys.stderr)
            raise SystemExit(STOPPED_EXIT_CODE)
