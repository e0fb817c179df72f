"""Signals that ask a run to save."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from .errors import STOPPED_EXIT_CODE


class Signals:
    """While active, SIGTERM (save and stop) and SIGUSR1 (save and go on) only leave a note.

    A signal reaches one rank; the loop spreads the notes with its per-step exchange, so all act together.
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
        if number == signal.SIGTERM:
            self.stop = True
            if self.at_once:
                raise SystemExit(STOPPED_EXIT_CODE)
        else:
            self.save = True
