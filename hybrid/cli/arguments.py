"""How a command line is read: the parser, and what an argument may be."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any, NoReturn

from hybrid.errors import UserError
from hybrid.paths import local_path


class UsageError(UserError):
    """A command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line; help texts keep their layout."""

    def __init__(self, *args, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def option(
    to: argparse._ActionsContainer,
    name: str,
    metavar: str,
    help: str,
    kind: Callable[[str], Any] = str,
    default: Any = None,
) -> None:
    """Declare an option with a value, in a parser or one of its groups."""
    to.add_argument(name, metavar=metavar, help=help, type=kind, default=default)


def part(text: str) -> tuple[int, int]:
    """Read `i/n`, such as 2/8."""
    try:
        part, parts = (int(number) for number in text.split("/"))
    except ValueError:
        part, parts = 0, 0
    if not 1 <= part <= parts:
        raise ArgumentTypeError(f"'{text}' is not of the form i/n with 1 <= i <= n, such as 2/8")
    return part, parts


def count(text: str, least: int = 1) -> int:
    """Read a whole number of `least` or more."""
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"'{text}' is not a whole number of {least} or more")
    return int(text)


def size(text: str) -> int:
    """Read a number of bytes, such as 4GB or 500MB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise ArgumentTypeError(f"'{text}' is not a number of bytes such as 4GB or 500MB")
    return max(1, int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")))


def path(text: str) -> str:
    """Read a path, `~` expanded."""
    try:
        return local_path(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def rank(text: str) -> int:
    """Read a whole number of 0 or more."""
    return count(text, least=0)


def layer_numbers(text: str) -> list[int]:
    """Read whole numbers of 0 or more with commas between them, such as 1,3."""
    return [count(number.strip(), least=0) for number in text.split(",")]


def port(text: str) -> int:
    """Read the number of a TCP port."""
    if not text.isdecimal() or not 1 <= int(text) < 2**16:
        raise ArgumentTypeError(f"'{text}' is not a port's number, 1 to 65535")
    return int(text)
