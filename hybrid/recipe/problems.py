"""What is wrong with a recipe: problems of single keys, and the error that lists them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from hybrid.errors import UserError

Tree = dict[str, Any]
"""A table of a recipe: keys, and values or tables of their own."""


class Problem(NamedTuple):
    """What is wrong with one key."""

    key: str
    words: str

    def __str__(self) -> str:
        return f"{self.key}: {self.words}"


class RecipeError(UserError):
    """Everything that is wrong with a recipe; `problems` has one text each."""

    def __init__(self, problems: Iterable[Problem | str], name: str | None = None) -> None:
        self.problems = list(dict.fromkeys(map(str, problems)))
        what = f"recipe {name}" if name else "the recipe"
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [problem.replace("\n", "\n    ") for problem in self.problems]
        super().__init__(f"{what} has {count}:" + "".join(f"\n  - {line}" for line in lines))


def join(key: str, name: str) -> str:
    """Name a key inside the table `key`, or at the top where that is empty."""
    return f"{key}.{name}" if key else name
