"""Keeping other people's messages out of the terminal: they go to logs/rank_N.log of the run."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

QUIET = ("DeepSpeed", "py.warnings", "torch")


@contextlib.contextmanager
def quiet(path: Path) -> Iterator[None]:
    """Send DeepSpeed's and torch's log messages and all warnings to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = {}
    logging.captureWarnings(True)
    for name in QUIET:
        logger = logging.getLogger(name)
        before[name] = (logger.handlers[:], logger.propagate)
        logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for name, (handlers, propagate) in before.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


@contextlib.contextmanager
def prints_to(path: Path) -> Iterator[None]:
    """Send what a library prints meanwhile to the file `path`."""
    with open(path, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield
