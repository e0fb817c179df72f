"""The program `hybrid`: finds the command, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import TextIO

from hybrid.errors import DEFECT_EXIT_CODE, UserError
from hybrid.layers.errors import did_you_mean

from .arguments import Parser, UsageError
from .commands import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 checks failed, 2 a mistake in what was asked,
    69 other processes of the run lost, 70 a defect of the program, 75 stopped by SIGTERM, 130 interrupted."""
    if sys.stdout is None:  # closed by who started us: nobody wants the text, files are written all the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character must not end the run
            stream.reconfigure(errors="backslashreplace")
    wait_briefly()
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        return _complain(str(error) or "interrupted", 130)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return 141  # what a shell reports for a program ended by SIGPIPE
        _name_output(error)
        return _complain(_describe(error), 2) if error.errno is not None else _report_defect(error)
    except UserError as error:
        return _complain(str(error), error.exit_code)
    except Exception as error:
        return _report_defect(error)


def _name_output(error: OSError) -> None:
    """Name standard output in an error that names no file, when what was printed cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        error.filename = error.filename or "standard output"
        _drop(sys.stdout)


def _drop(stream: TextIO) -> None:
    """Drop what a stream still holds, so that Python's last flush of it has nothing to say."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: replaced by something that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def wait_briefly() -> None:
    """Let waiting threads spin only for a short while; to be called before torch loads its OpenMP.

    Threads that spin while they wait stand in each other's way where a core is shared: a quickstart step took
    10 s beside one busy process. With spins this short it took 1.6 s, and no longer than before on an idle
    machine (a third longer when they sleep at once).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def _dispatch(argv: Sequence[str]) -> int:
    main_parser = _main_parser()
    arguments = main_parser.parse_args(argv)
    if arguments.command is None:
        print(main_parser.format_help(), end="")
        return 0
    command = COMMANDS.get(arguments.command)
    if command is None:
        hint = did_you_mean(arguments.command, COMMANDS) or "."
        raise UsageError(f"unknown command '{arguments.command}'{hint} Commands: {', '.join(COMMANDS)}")
    parser = Parser(
        prog=f"hybrid {arguments.command}",
        description=command.summary,
        epilog=f"example:\n  {command.example}",
    )
    command.declare(parser)
    return command.run(parser.parse_intermixed_args(arguments.arguments))


def _main_parser() -> Parser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="hybrid",
        usage="hybrid [-h] [--version] COMMAND ...",
        description="Train hybrid language models whose layers are mixed by a pattern string.",
        epilog=f"commands:\n{listing}\n\n`hybrid COMMAND --help` shows its arguments and an example.",
    )
    parser.add_argument("--version", action="version", version=f"hybrid {version('kvm-hybrid')}")
    # The deepspeed launcher puts this first; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _complain(message: str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (rank {rank})"
    try:
        print(f"hybrid: error{where}: {message}", file=sys.stderr, flush=True)
    except OSError:  # whoever cannot be told has the code
        _drop(sys.stderr)
    return code


def _report_defect(error: Exception) -> int:
    """Write the traceback of an error that nobody is meant to see to a file, and say so in one line."""
    trace = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            prefix="hybrid-defect-",
            suffix=".txt",
            delete=False,
        ) as file:
            file.write(f"hybrid {version('kvm-hybrid')}: {' '.join(sys.argv[1:])}\n\n{trace}")
        where = f"its traceback is in {file.name}"
    except OSError as unwritten:
        print(trace, file=sys.stderr)
        where = f"its traceback is above, as it could not be written to a file ({_describe(unwritten)})"
    said = " ".join(str(error).split())
    what = f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
    return _complain(f"a defect of the program, please report it: {what} ({where})", DEFECT_EXIT_CODE)


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*names, reason])


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more (and not some other pipe that broke)."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by something that is no file
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    _drop(sys.stdout)
    return True
