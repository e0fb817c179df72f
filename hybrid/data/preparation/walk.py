"""Finding files: one walk for folders and patterns. Links are followed, but each folder is walked once."""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import stat
from collections.abc import Callable, Iterator, Set
from pathlib import Path

Identity = tuple[int, int] | str


def identity(path: str) -> Identity:
    """Tell files and folders apart whatever they are called: device and inode, or the real path on file
    systems without inodes."""
    found = os.stat(path)
    return (found.st_dev, found.st_ino) if found.st_ino else os.path.realpath(path)


class Walk:
    """Finds files; what cannot be opened, resolved or listed is told to `problem` (reason, path), once."""

    def __init__(
        self, problem: Callable[[str, str], None], left_out: Set[str] = frozenset({"__pycache__"})
    ) -> None:
        self._problem = problem
        self._left_out = left_out
        """Names of folders that are not entered."""
        self._told: set[str] = set()

    def find(self, path: str) -> list[str] | None:
        """List the files that `path` stands for, in a fixed order: a file, all below a folder but hidden
        ones, or those that fit a pattern; None: there is no such path."""
        if os.path.isdir(path):
            found = [file for _, files in self._folders(path) for file in files]
            found.sort(key=lambda file: Path(file).relative_to(path).parts)
        elif os.path.lexists(path):
            found = [path]
        elif glob.has_magic(path):
            root = "/" if path.startswith("/") else ""
            found = sorted(set(self._fitting(root, [part for part in path.split("/") if part])))
        else:
            return None
        return [file for file in found if self._is_file(file)]

    def _folders(self, root: str) -> Iterator[tuple[str, list[str]]]:
        """Walk down from `root`: each folder and the paths of what it holds but folders."""
        waiting, seen = [root], set()
        while waiting:
            folder = waiting.pop()
            if not (names := self._names(folder)) or (found := identity(folder or ".")) in seen:
                continue
            seen.add(found)
            paths = [os.path.join(folder, name) for name in names if not name.startswith(".")]
            inner = [path for path in paths if os.path.isdir(path)]
            waiting += [path for path in reversed(inner) if os.path.basename(path) not in self._left_out]
            yield folder, [path for path in paths if not os.path.isdir(path)]

    def _fitting(self, folder: str, parts: list[str]) -> Iterator[str]:
        """Find the paths below `folder` that fit the pattern's `parts`."""
        part, rest = parts[0], parts[1:]
        if part == "**":
            for below, paths in self._folders(folder):
                if rest:
                    for path in paths:  # may lead to a folder that is lost
                        if os.path.islink(path) and not os.path.exists(path):
                            self._is_file(path)
                    yield from self._fitting(below, rest)
                else:
                    yield from paths
            return
        if glob.has_magic(part):
            names = [name for name in self._names(folder) if fnmatch.fnmatchcase(name, part)]
            names = [name for name in names if part.startswith(".") or not name.startswith(".")]
        else:
            names = [part] if os.path.lexists(os.path.join(folder, part)) else []
        for path in (os.path.join(folder, name) for name in names):
            if rest and os.path.isdir(path):
                yield from self._fitting(path, rest)
            elif not rest and not os.path.isdir(path):
                yield path

    def _names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder or "."))
        except OSError as error:
            self._tell(f"cannot be listed ({error.strerror})", folder)
            return []

    def _is_file(self, path: str) -> bool:
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            if os.path.islink(path) and error.errno in (errno.ENOENT, errno.ENOTDIR):
                self._tell("a link to what is not here (content that was never fetched?)", path)
            elif error.errno == errno.ELOOP:
                self._tell("a link that leads to itself", path)
            else:
                self._tell(f"cannot be found ({error.strerror})", path)
            return False
        if not stat.S_ISREG(mode):
            self._tell("a pipe, socket or device, not a file", path)
        return stat.S_ISREG(mode)

    def _tell(self, reason: str, path: str) -> None:
        if path not in self._told:
            self._told.add(path)
            self._problem(reason, path)
