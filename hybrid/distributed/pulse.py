"""Signs of life of this process. Light: nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Pulse:
    """What `watch` looks at: `beats` counts, `doing` says where, `patient` allows long work without beats,
    `waiting` tells that this process waits for others."""

    def __init__(self) -> None:
        self.beats = 0
        self.doing = "starting"
        self.patient = 0
        self.waiting = False

    def beat(self, doing: str = "") -> None:
        """Something was finished; `doing`: what comes next, if it has a name."""
        self.beats += 1
        if doing:
            self.doing = doing

    @contextmanager
    def wait(self) -> Iterator[None]:
        """An exchange between the processes."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def patience(self, doing: str) -> Iterator[None]:
        """A stretch of work whose length says nothing: data preparation, compilation, building a model."""
        before, self.doing = self.doing, doing
        self.patient += 1
        try:
            yield
        finally:
            self.patient -= 1
            self.beat(before)
