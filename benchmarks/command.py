"""What the scripts share: arguments, sections that are run and kept, and the table of numbers to reach."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid.cli.commands import keep_freed_memory
from hybrid.text import columns
from hybrid.train.benchmark import environment, keep


@dataclass(frozen=True)
class Row:
    """One number to reach."""

    work: str
    against: str
    measured: float
    target: float
    at_least: bool = True
    ideal: float | None = None
    """What counted FLOPs promise, where they promise anything."""
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def cells(self) -> list[str]:
        bound = "at least" if self.at_least else "at most"
        ideal = "-" if self.ideal is None else f"{self.ideal:.3g}{self.unit}"
        target = f"{bound} {self.target:g}{self.unit}"
        met = "met" if self.met else "MISSED"
        return [self.work, self.against, f"{self.measured:.3g}{self.unit}", ideal, target, met]


def rows_table(rows: Sequence[Row]) -> str:
    """Format rows, each with its verdict."""
    heading = ["work", "against", "measured", "ideal", "target", ""]
    return columns([heading, *(row.cells() for row in rows)], left={0, 1, 5})


def keep_section(path: Path, name: str, found: Mapping[str, Any]) -> None:
    """Write a section's results into a JSON file that may hold others."""
    rows = [{**asdict(row), "met": row.met} for row in found.get("rows", ())]
    keep(path, {name: {**found, "rows": rows} if "rows" in found else found})


def make_parser(description: str | None, sections: Iterable[str]) -> argparse.ArgumentParser:
    """Make the parser of a script that has these sections."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: seconds, to see that it runs")
    parser.add_argument("--only", action="append", choices=list(sections), help="one section; repeatable")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep JSON and plots there")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    return parser


def begin(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line (`argv` None: the process's) and set this process up as `hybrid` would."""
    given = parser.parse_args(argv)
    keep_freed_memory()
    torch.set_num_threads(given.threads or len(os.sched_getaffinity(0)))
    return given


def output_file(given: argparse.Namespace, name: str) -> Path | None:
    """Return where a result goes, if anywhere; results of tiny sizes never replace real ones."""
    path = None if given.output is None else given.output / name
    return path.with_stem(f"{path.stem}-quick") if path and given.quick else path


def run_sections(
    name: str, sections: Mapping[str, Callable[[Any], dict[str, Any]]], sizes: Any, given: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Run the chosen sections; print the rows to reach, and keep results in `name`.json as they come.

    A section takes `sizes` and returns what goes into the JSON, with its numbers to reach as `rows`.
    """
    path = output_file(given, f"{name}.json")
    found: dict[str, dict[str, Any]] = {}
    for section in given.only or sections:
        print(f"{section} ...", flush=True)
        found[section] = {"environment": environment(), **sections[section](sizes)}
        if path is not None:
            keep_section(path, section, found[section])
    rows = [row for one in found.values() for row in one.get("rows", ())]
    if rows:
        print(f"\n{rows_table(rows)}")
    if given.quick:
        print("\nThese are tiny sizes, to see that everything runs: the targets do not apply to them.")
    return found
