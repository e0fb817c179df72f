"""Comparing prepared data with their checksums. Indexes are compared whenever they are read, ids here."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hybrid.errors import DataError, words
from hybrid.recipe.schema import DataSection

from .preparation.report import read_report
from .preparation.shards import TokenFile, open_shard
from .store import Store


def check_prepared(data: DataSection) -> str:
    """Compare all shards of a recipe's sources with their checksums; returns in words what was found.

    Raises DataError naming every file that is not as it was written.
    """
    folder = Path(data.folder)
    report = read_report(folder / "report.json")
    known = {name: entry["shards"] for name, entry in report["sources"].items() if name in data.sources}

    def read(source: str, shard: str) -> TokenFile | str:
        try:
            file = open_shard(folder, source, shard, report["tokenizer"])[1]
            return file.fault() or file
        except (DataError, OSError) as error:
            return words(error)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # hashing runs beside other threads
        jobs = [pool.submit(read, name, shard) for name, shards in known.items() for shard in shards]
    found = [job.result() for job in jobs]
    if faults := [fault for fault in found if isinstance(fault, str)]:
        raise DataError("\n  ".join([f"{folder}: {len(faults)} of {len(found)} shards are damaged", *faults]))
    Store(data)  # whether the tokenizer and the report fit them
    result = f"{folder}: {len(found)} shards are as they were written"
    if unknown := sum(isinstance(file, TokenFile) and file.sha256 is None for file in found):
        result += f"; {unknown} have no checksums, as an earlier version made them: sizes were compared"
    return result


class ShardCheck:
    """Compares token shards with their checksums in a thread beside training; every rank reads its share."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.fault: DataError | None = None
        """What is wrong with the first damaged shard."""
        self._thread = threading.Thread(target=self._read, args=(files,), daemon=True, name="shard check")
        self._thread.start()

    def over(self, wait: float | None = 0.0) -> bool:
        """Tell whether all shards are compared or one is damaged; `wait` for it so many seconds (None: as
        long as it takes)."""
        self._thread.join(wait)
        return not self._thread.is_alive()

    def _read(self, files: Sequence[TokenFile]) -> None:
        for file in files:
            try:
                fault = file.fault()
            except OSError as error:
                fault = words(error)
            if fault is not None:
                self.fault = DataError(fault)
                return
