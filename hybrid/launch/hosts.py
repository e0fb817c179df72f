"""Which hosts a run uses: DeepSpeed's hostfiles and filters, read strictly.

A hostfile has a line `NAME slots=N` for each host; blank lines and `#` comments are skipped. A filter is
`NAME[:SLOT,SLOT...]`, several joined by `@`. What this accepts DeepSpeed reads alike; what it refuses
DeepSpeed would take for something else, or complain about after hosts were already contacted.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid.errors import LaunchError
from hybrid.layers.errors import did_you_mean
from hybrid.text import decode

_NAME = r"[A-Za-z0-9](?:[\w.-]*\w)?"
_LINE = re.compile(rf"(?P<name>{_NAME})\s+slots=(?P<slots>\d+)")


@dataclass(frozen=True)
class Host:
    """A machine and the devices to use there, one process each."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: str | Path) -> list[Host]:
    """Read the hosts, in the file's order.

    Raises LaunchError with every line that cannot be used: file, line number, text, and what is wrong.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        lines = decode(data).splitlines()
    except FileNotFoundError:
        raise LaunchError(
            f"there is no hostfile {path}. To train on this machine alone, leave --hostfile out"
        ) from None
    except OSError as error:
        raise LaunchError(f"the hostfile {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise LaunchError(f"the hostfile {path} {error}") from None
    if data.startswith(codecs.BOM_UTF8):
        words = "begins with a byte mark (BOM), which DeepSpeed takes for a part of the first name"
        raise LaunchError(f"the hostfile {path} {words}: save it without")
    found: dict[str, Host] = {}
    written: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        host = _host(text)
        if isinstance(host, str):
            problems.append(f"{path}, line {number}: {line.strip()!r}: {host}")
        elif host.name in found:
            words = f"{host.name} stands already in line {written[host.name]}; give all its slots there"
            problems.append(f"{path}, line {number}: {line.strip()!r}: {words}")
        else:
            found[host.name], written[host.name] = host, number
    if not problems and not found:
        problems.append(f"{path}: names no host; expected lines such as 'worker-0 slots=8'")
    if problems:
        raise LaunchError("\n  ".join(["nothing was launched:", *problems]) if problems[1:] else problems[0])
    return list(found.values())


def _host(text: str) -> Host | str:
    """Read the host of a line without its comment, or say what is wrong with the line."""
    match = _LINE.fullmatch(text)
    if match is None:
        return "expected 'NAME slots=N', such as 'worker-0 slots=8'"
    slots = int(match["slots"])
    return Host(match["name"], tuple(range(slots))) if slots else "slots must be 1 or more"


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Choose the hosts and slots that the filters leave, in the hosts' order.

    Raises LaunchError quoting the filter and the part of it that is malformed or names what is not there.
    """
    if include and exclude:
        raise LaunchError(f"--include {include!r} and --exclude {exclude!r}: give one of the two")
    if include:
        named = _filter("--include", include, hosts)
        left = [replace(host, slots=named[host.name]) for host in hosts if host.name in named]
    elif exclude:
        named = _filter("--exclude", exclude, hosts)
        left = [
            replace(host, slots=tuple(slot for slot in host.slots if slot not in named.get(host.name, ())))
            for host in hosts
        ]
    else:
        return list(hosts)
    left = [host for host in left if host.slots]
    if not left:
        raise LaunchError(f"--exclude {exclude!r} leaves no slot of {listed(host.name for host in hosts)}")
    return left


def _filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    """Read a filter: host name -> slots; a host without slots means all of its."""
    known = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...]] = {}

    def refuse(part: str, words: str) -> LaunchError:
        shown = f"{option} {text!r}" if part == text else f"{option} {text!r}, in {part!r}"
        return LaunchError(f"{shown}: {words}; a filter is NAME[:SLOT,SLOT...], several joined by @")

    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        if not re.fullmatch(_NAME, name):
            raise refuse(part, f"{name!r} is not a host's name")
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {listed(known)}"
            raise refuse(part, f"there is no host {name!r}{hint}")
        if name in found:
            raise refuse(part, f"{name} is named twice")
        slots = []
        for slot in numbers.split(",") if colon else ():
            if not slot.isdecimal():
                raise refuse(
                    part, f"{slot!r} is not a slot's number" if slot else "a slot's number is missing"
                )
            if int(slot) not in known[name]:
                raise refuse(part, f"{name} has no slot {slot} (it has {_span(known[name])})")
            if int(slot) in slots:
                raise refuse(part, f"slot {slot} is named twice")
            slots.append(int(slot))
        found[name] = tuple(sorted(slots)) if colon else known[name]
    return found


def first(hosts: Sequence[Host], nodes: int | None, slots: int | None) -> list[Host]:
    """Choose the first `nodes` hosts with their first `slots` slots (None: all); LaunchError for too few."""
    if nodes is not None and nodes > len(hosts):
        raise LaunchError(
            f"--nodes is {nodes}, but there are {len(hosts)} hosts: {listed(h.name for h in hosts)}"
        )
    chosen = list(hosts[:nodes])
    if slots is None:
        return chosen
    for host in chosen:
        if len(host.slots) < slots:
            raise LaunchError(f"--gpus is {slots}, but {host.name} has {len(host.slots)} slots")
    return [replace(host, slots=host.slots[:slots]) for host in chosen]


def _span(slots: Sequence[int]) -> str:
    whole = len(slots) > 1 and tuple(slots) == tuple(range(slots[0], slots[-1] + 1))
    return f"{slots[0]}-{slots[-1]}" if whole else ", ".join(map(str, slots))


def listed(names: Iterable[str]) -> str:
    """List all names, or the first eight and how many more."""
    names = list(names)
    return ", ".join([*names[:8], f"and {len(names) - 8} more"] if len(names) > 9 else names)
