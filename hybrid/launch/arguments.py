"""The arguments of `hybrid launch`. Light: `hybrid launch --help` imports no torch."""

from __future__ import annotations

from argparse import ArgumentParser

from hybrid.cli import arguments

from .plan import LAUNCHERS


def declare(parser: ArgumentParser) -> None:
    """Everything but the recipe."""
    where = parser.add_argument_group("where")
    where.add_argument(
        "--nodes", type=arguments.count, metavar="N", help="default: 1, or every host of the hostfile"
    )
    where.add_argument(
        "--gpus",
        type=arguments.count,
        metavar="M",
        help="processes on a node; default: its GPUs or hostfile slots",
    )
    where.add_argument("--hostfile", metavar="FILE", help="lines `NAME slots=N`, the first is the master")
    filters = "hosts and slots of the hostfile, such as 'worker-0@worker-1:0,2'"
    where.add_argument("--include", default="", metavar="FILTER", help=f"only these {filters}")
    where.add_argument("--exclude", default="", metavar="FILTER", help="all but these")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="default: deepspeed, or torchrun for nodes without a hostfile",
    )
    how.add_argument("--master-addr", metavar="NAME", help="default: the hostfile's first host")
    how.add_argument(
        "--master-port",
        type=arguments.port,
        metavar="P",
        help="default: a free one, or 29500 for several nodes",
    )
    how.add_argument(
        "--node-rank", type=arguments.rank, metavar="I", help="start only node I, which is this machine"
    )
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="print commands, layout, memory and communication; start nothing",
    )
