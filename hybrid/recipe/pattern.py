"""Layer patterns: "(R3K)6" <-> list of letters.

    pattern = unit { unit }
    unit    = ( LETTER | "(" pattern ")" ) [ COUNT ]

A letter is one of A-Z and stands for one block, a count is 1 or more without leading zeros, white space
between the parts is ignored. What a letter means is the recipe's business (`model.layers`).
"""

from __future__ import annotations

import re
import string
from collections import deque
from collections.abc import Collection, Sequence
from functools import cache

from hybrid.errors import UserError

DEFAULT_LETTERS: dict[str, str] = {
    "K": "kvm",
    "F": "full",
    "W": "sliding_window",
    "B": "block_window",
    "R": "rwkv7",
    "G": "gated_deltanet",
    "D": "kimi_delta",
    "M": "mamba2",
    "Q": "ovq",
}
"""Letter -> registry kind, for letters that a recipe does not bind itself."""

MAX_LAYERS = 4096
_MAX_PERIOD = 256  # compress() looks for repeats of at most this many letters
_TOKEN = re.compile(r"[0-9]+|[^ \t\r\n]")


class PatternError(UserError):
    """A pattern that cannot be read; the message shows it with a caret under the fault."""

    def __init__(self, pattern: str, position: int, problem: str) -> None:
        shown = re.sub(r"[\t\r\n]", " ", pattern)
        start = max(0, position - 60)
        shown, position = shown[start : position + 20], position - start
        super().__init__(f"{problem}\n  {shown}\n  {' ' * position}^")


def expand(pattern: str, letters: Collection[str] | None = None) -> list[str]:
    """List the letters of a pattern, one a layer.

    Args:
        pattern: see the grammar above.
        letters: the letters that have a meaning; None: all of A-Z.

    Raises:
        PatternError: not the grammar, a letter without meaning, or more than 4096 layers. The size is
            checked before a repetition is written out.
    """
    if not isinstance(pattern, str):
        raise PatternError(str(pattern), 0, f"a pattern is text, found {type(pattern).__name__}")
    groups: list[list[str]] = [[]]
    opened: list[int] = []
    tokens = deque((match[0], match.start()) for match in _TOKEN.finditer(pattern))
    while tokens:
        token, start = tokens.popleft()
        if token == "(":
            groups.append([])
            opened.append(start)
            continue
        if token == ")":
            if not opened:
                raise PatternError(pattern, start, "')' closes no group")
            if not groups[-1]:
                raise PatternError(pattern, start, "a group needs at least one letter")
            start, unit = opened.pop(), groups.pop()
        else:
            _check_letter(pattern, start, letters)
            unit = [token]
        count = 1
        if tokens and tokens[0][0][0] in string.digits:
            count = _read_count(pattern, *tokens.popleft())
        if len(groups[-1]) + len(unit) * count > MAX_LAYERS:
            raise PatternError(pattern, start, f"the pattern has more than {MAX_LAYERS} layers")
        groups[-1].extend(unit * count)
    if opened:
        raise PatternError(pattern, opened[-1], "this group is never closed")
    if not groups[0]:
        raise PatternError(pattern, 0, "the pattern is empty: at least one letter is needed")
    return groups[0]


def _check_letter(pattern: str, position: int, letters: Collection[str] | None) -> None:
    char = pattern[position]
    where = f"at position {position + 1}"
    legal = f"letters with a meaning here: {' '.join(sorted(letters))}" if letters else "letters are A-Z"
    if char in string.digits:
        raise PatternError(pattern, position, f"a count {where} needs a letter or a group before it")
    if char not in string.ascii_uppercase:
        hint = f" (did you mean {char.upper()!r}?)" if char in string.ascii_lowercase else ""
        raise PatternError(pattern, position, f"unexpected {char!r} {where}{hint}; {legal}")
    if letters is not None and char not in letters:
        raise PatternError(pattern, position, f"unknown letter {char!r} {where}; {legal}")


def _read_count(pattern: str, digits: str, position: int) -> int:
    if digits.startswith("0"):
        words = f"a count is 1 or more, without leading zeros, not {digits[:9]}"
        raise PatternError(pattern, position, words)
    if len(digits) > len(str(MAX_LAYERS)):
        raise PatternError(pattern, position, f"the pattern has more than {MAX_LAYERS} layers")
    return int(digits)


def compress(letters: Sequence[str]) -> str:
    """Write a short pattern that expands to `letters` (not always the shortest)."""
    text = "".join(letters)
    assert len(text) == len(letters), "letters are single characters"
    return _compress(text)


@cache
def _compress(text: str) -> str:
    out = []
    position = 0
    while position < len(text):
        run = _repeats(text, position, 1)
        best, covered = text[position] + (str(run) if run > 1 else ""), run
        for period in range(2, min(_MAX_PERIOD, (len(text) - position) // 2) + 1):
            times = _repeats(text, position, period)
            if times < 2:
                continue
            written = f"({_compress(text[position : position + period])}){times}"
            # letters saved, compared with those that writing the run alone would save
            if period * times - len(written) > covered - len(best):
                best, covered = written, period * times
        out.append(best)
        position += covered
    return "".join(out)


def _repeats(text: str, position: int, period: int) -> int:
    """Count how often the `period` letters at `position` follow one another."""
    unit = text[position : position + period]
    times = 1
    while text.startswith(unit, position + times * period):
        times += 1
    return times
