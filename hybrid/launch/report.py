"""`hybrid launch --dry-run`: the commands that would start, who sits where, memory and communication."""

from __future__ import annotations

from hybrid.estimate import info
from hybrid.recipe import Recipe, batch_geometry
from hybrid.text import columns

from .hosts import Host
from .plan import Command, Plan

SHOWN = 16
"""Nodes listed one by one; of more, the first two and the last."""


def describe(plan: Plan, recipe: Recipe) -> str:
    """Write the whole report.

    Raises:
        RecipeError: the batch does not divide over the processes.
    """
    geometry = batch_geometry(recipe, plan.processes)
    model = info.meta_model(recipe)
    parts = [
        commands(plan),
        layout(plan.hosts, recipe.parallel.sequence),
        info.batch(model, recipe, geometry),
        info.memory(model, recipe, geometry),
        info.communication(model, recipe, geometry),
    ]
    return "\n\n".join(parts)


def commands(plan: Plan) -> str:
    """Write every command that starts the run, ready for a shell."""
    lines = []
    if plan.from_here is not None:
        lines.append(_shown(plan.from_here))
    if plan.commands != [plan.from_here]:
        if plan.from_here is not None:
            lines.append("or on each node its own, without ssh:")
        more = f"  ... {len(plan.commands) - 3} more ..."
        lines += [_shown(command) if command else more for command in _few(plan.commands)]
    if plan.launcher == "slurm":
        lines.append(
            "it runs, on every node: srun ... hybrid train RECIPE, and goes back to the queue on code 75"
        )
    return "Commands, in the same folder on every node\n" + "\n".join(lines)


def _shown(command: Command) -> str:
    names = command.shell_variables
    needs = f", with {' and '.join(names)} set" if names else ""
    return f"  on {command.where}{needs}:\n    {command}"


def _few(items: list) -> list:
    """Return all, or the first two, None, and the last."""
    return items if len(items) <= SHOWN else [*items[:2], None, items[-1]]


def layout(hosts: list[Host], sequence: int) -> str:
    """Show which ranks sit where: rank r works on shard r % sequence of data-parallel place r // sequence."""
    ranks = sum(len(host.slots) for host in hosts)
    rows: list[list[str]] = []
    first = 0
    split = []
    for host in hosts:
        end = first + len(host.slots)
        rows.append([host.name, _span(first, end), _span(first // sequence, -(-end // sequence))])
        if first % sequence or end % sequence:
            split.append(host.name)
        first = end
    heading = ["node", "ranks", "data-parallel places"]
    cells = [row if row else ["...", "", ""] for row in _few(rows)]
    nodes = "1 node" if len(hosts) == 1 else f"{len(hosts):,} nodes"
    places = f"{ranks // sequence:,} data-parallel x {sequence} per sequence"
    text = f"Layout: {nodes}, {ranks:,} ranks = {places}\n"
    text += columns([heading, *cells], left={0, 1, 2}, indent="  ")
    if split:
        text += (
            f"\n  the {sequence} ranks of a sequence do not stay on one node ({', '.join(split[:3])}"
            f"{', ...' if split[3:] else ''}): their exchange inside every layer crosses the network"
        )
    return text


def _span(first: int, end: int) -> str:
    return f"{first}" if end - first == 1 else f"{first}-{end - 1}"
