"""One process of a preparation: takes units as JSON lines on standard input, answers on standard output.

A process of its own, not a fork, so that it is safe beside torch and its threads. It ends at once when its
standard input closes, that is, when the preparation it belongs to is gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .shards import build, unit_from_json
from .tokenizer import Tokenizer


def main(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the preparation too, which ends us
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    jobs: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    tokenizer = Tokenizer.load(Path(folder) / "tokenizer.model")
    while True:
        answers.write(json.dumps(_work(Path(folder), json.loads(jobs.get()), tokenizer)) + "\n")
        answers.flush()


def _work(folder: Path, job: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    try:
        build(folder, unit_from_json(job["unit"]), SourceSection(**job["section"]), tokenizer)
    except DataError as error:
        return {"refused": str(error)}
    except Exception:
        return {"failed": traceback.format_exc()}
    return {}


def _listen(jobs: queue.Queue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
