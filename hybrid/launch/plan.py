"""The plan of a run: from what was asked to the commands that start it, one a node or one for all."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybrid.distributed.environment import free_port
from hybrid.errors import LaunchError

from . import hosts
from .hosts import Host

LAUNCHERS = ("deepspeed", "torchrun", "slurm")
DEFAULT_PORT = 29500
"""Where the processes of several nodes meet; a run on one machine takes a free port."""
SLURM_SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "slurm.sbatch"


@dataclass(frozen=True)
class Request:
    """Wishes of the command line; None and "" mean: not said."""

    recipe: str
    overrides: tuple[str, ...] = ()
    launcher: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    master_addr: str | None = None
    master_port: int | None = None
    node_rank: int | None = None

    @property
    def cluster(self) -> bool:
        """Whether a single node is one of a cluster's and not simply this machine."""
        return self.hostfile is not None or self.master_addr is not None

    @property
    def train(self) -> list[str]:
        return ["hybrid", "train", self.recipe, *self.overrides]


class Command(NamedTuple):
    """Command to run at one place."""

    where: str
    argv: list[str]
    shell_variables: tuple[str, ...] = ()
    """Variables of the node's environment that stand in `argv` as $NAME."""

    def __str__(self) -> str:
        text = shlex.join(self.argv)
        for name in self.shell_variables:
            text = text.replace(f"'${name}'", f'"${name}"')
        return text


@dataclass(frozen=True)
class Plan:
    """A run on its hosts."""

    launcher: str
    hosts: list[Host]
    """In the order of their ranks. Where nobody said their names they are called node 0, node 1, ..."""
    commands: list[Command]
    """One for each node, or one that serves all."""
    from_here: Command | None
    """The command that starts all nodes from this machine; None where there is none."""
    master: str | None
    """Name of the machine where the processes meet; None where the launcher finds it."""
    port: int | None

    @property
    def processes(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    def command(self, node_rank: int | None) -> Command:
        """Choose what this machine has to run: one node, or what starts all; LaunchError for neither."""
        missing = [name for command in self.commands for name in command.shell_variables]
        if missing:
            raise LaunchError(
                f"where the {len(self.hosts)} nodes meet is not known: give --hostfile, or on each node "
                "--master-addr and --node-rank"
            )
        if node_rank is not None:
            return self.commands[node_rank]
        if self.from_here is None:
            raise LaunchError(
                f"{self.launcher} does not start the nodes from one of them: run this on each with "
                f"--node-rank 0 to {len(self.hosts) - 1}, or once with --launcher deepspeed and a --hostfile"
            )
        return self.from_here


def plan(request: Request) -> Plan:
    """Check the request and work out its commands; nothing is contacted or started.

    Raises LaunchError for options that contradict each other, and for a hostfile or filter that is wrong.
    """
    several_unnamed = request.hostfile is None and (request.nodes or 1) > 1
    launcher = request.launcher or ("torchrun" if several_unnamed else "deepspeed")
    if launcher == "slurm":
        return _slurm(request)
    if request.hostfile is None:
        chosen = _unnamed_hosts(request, launcher)
    else:
        chosen = _named_hosts(request, request.hostfile)
    rank = request.node_rank
    if rank is not None and rank >= len(chosen):
        raise LaunchError(f"--node-rank is {rank}, but there are {len(chosen)} nodes: 0 to {len(chosen) - 1}")
    if launcher == "torchrun":
        return _torchrun(request, chosen)
    return _deepspeed(request, chosen)


def _named_hosts(request: Request, hostfile: str) -> list[Host]:
    if (request.include or request.exclude) and (request.nodes or request.gpus):
        raise LaunchError(
            "--nodes and --gpus choose hosts and slots as --include and --exclude do: give one kind"
        )
    pool = hosts.read_hostfile(hostfile)
    chosen = hosts.select(pool, request.include, request.exclude)
    return hosts.first(chosen, request.nodes, request.gpus)


def _unnamed_hosts(request: Request, launcher: str) -> list[Host]:
    nodes = request.nodes or 1
    if nodes > 1 and launcher == "deepspeed":
        raise LaunchError(
            f"--nodes is {nodes}, and the deepspeed launcher needs their names: give --hostfile, or take "
            "--launcher torchrun or slurm"
        )
    if request.include or request.exclude:
        here = Host("localhost", tuple(range(_gpus_here())))
        if not here.slots:
            raise LaunchError("--include and --exclude choose GPUs, and this machine has none: give --gpus")
        if nodes > 1 or request.gpus or launcher == "torchrun":
            raise LaunchError(
                "--include and --exclude need --hostfile here, or --launcher deepspeed and one node"
            )
        return hosts.select([here], request.include, request.exclude)
    gpus = request.gpus or _gpus_here()
    if not gpus:
        raise LaunchError("this machine has no GPU: say with --gpus how many processes to start on a node")
    slots = tuple(range(gpus))
    return [Host("localhost", slots)] if nodes == 1 else [Host(f"node {i}", slots) for i in range(nodes)]


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _slurm(request: Request) -> Plan:
    """Plan for Slurm, which chooses the hosts and tells each process its place (in `launch/slurm.sbatch`)."""
    given = {
        "--hostfile": request.hostfile, "--include": request.include, "--exclude": request.exclude,
        "--master-addr": request.master_addr, "--master-port": request.master_port,
        "--node-rank": request.node_rank,
    }  # fmt: skip
    for option, value in given.items():
        if value not in (None, ""):
            raise LaunchError(f"{option} has no place with --launcher slurm: Slurm chooses hosts and ranks")
    if request.gpus is None:
        raise LaunchError("--launcher slurm needs --gpus: how many processes to start on a node")
    if not SLURM_SCRIPT.exists():
        raise LaunchError(f"{SLURM_SCRIPT} is not there: it comes with the repository, not with the package")
    nodes = request.nodes or 1
    argv = ["sbatch", f"--nodes={nodes}"]
    argv += [f"--{what}-per-node={request.gpus}" for what in ("ntasks", "gpus")]
    argv += [_short(SLURM_SCRIPT), request.recipe, *request.overrides]
    names = [Host(f"node {i}", tuple(range(request.gpus))) for i in range(nodes)]
    command = Command("a login node", argv)
    return Plan("slurm", names, [command], command, None, None)


def _torchrun(request: Request, chosen: list[Host]) -> Plan:
    for host in chosen:
        if host.slots != tuple(range(len(host.slots))):
            raise LaunchError(
                f"torchrun takes a node's first GPUs, not slots {', '.join(map(str, host.slots))} "
                f"of {host.name}: use --launcher deepspeed, or set CUDA_VISIBLE_DEVICES there"
            )
    start = [_program("torchrun")]
    module = ["-m", *request.train]
    if len(chosen) == 1 and not request.cluster:
        meeting = ["--standalone"]
        if request.master_port:
            meeting = ["--master_addr", "127.0.0.1", "--master_port", str(request.master_port)]
        argv = [*start, *meeting, "--nproc_per_node", str(len(chosen[0].slots)), *module]
        command = Command("this machine", argv)
        return Plan("torchrun", chosen, [command], command, None, request.master_port)
    port = request.master_port or DEFAULT_PORT
    address = request.master_addr or (chosen[0].name if request.hostfile else "$MASTER_ADDR")
    known = address != "$MASTER_ADDR"
    commands = []
    for rank, host in enumerate(chosen if known else chosen[:1]):
        argv = [*start, "--nnodes", str(len(chosen)), "--nproc_per_node", str(len(host.slots))]
        argv += ["--node_rank", str(rank) if known else "$NODE_RANK", "--master_addr", address]
        argv += ["--master_port", str(port), *module]
        if known:
            commands.append(Command(host.name, argv))
        else:
            commands.append(Command("every node", argv, ("NODE_RANK", "MASTER_ADDR")))
    return Plan("torchrun", chosen, commands, None, address if known else None, port)


def _deepspeed(request: Request, chosen: list[Host]) -> Plan:
    start = [_program("deepspeed"), "--quiet"]
    module = ["--module", *request.train]
    for option, text in (("--include", request.include), ("--exclude", request.exclude)):
        if text:
            start += [option, text]
    if request.hostfile is None:
        port = request.master_port or free_port()
        if not request.include and not request.exclude:
            start += ["--num_gpus", str(len(chosen[0].slots))]
        command = Command("this machine", [*start, "--master_port", str(port), *module])
        return Plan("deepspeed", chosen, [command], command, None, port)
    start += ["--hostfile", request.hostfile]
    if request.nodes:
        start += ["--num_nodes", str(request.nodes)]
    if request.gpus:
        start += ["--num_gpus", str(request.gpus)]
    address, port = request.master_addr or chosen[0].name, request.master_port or DEFAULT_PORT
    meeting = ["--master_addr", address, "--master_port", str(port)]
    commands = [
        Command(host.name, [*start, "--no_ssh", "--node_rank", str(rank), *meeting, *module])
        for rank, host in enumerate(chosen)
    ]
    # With a single host DeepSpeed would start it here, whatever its name.
    force = ["--force_multi"] if len(chosen) == 1 else []
    remote = ["--module", *map(_quoted, request.train)]
    from_here = Command("one machine that reaches all by ssh, with pdsh", [*start, *force, *meeting, *remote])
    return Plan("deepspeed", chosen, commands, from_here, address, port)


def _quoted(argument: str) -> str:
    """Write an argument so that it arrives on other hosts as it is.

    DeepSpeed hands one command line to pdsh, pdsh replaces %h, %u, %n and %% in it and gives it to ssh, and
    a shell on each host takes it apart again. DeepSpeed protects only spaces and double quotes.
    """
    argument = argument.replace("%", "%%")
    if " " in argument:  # DeepSpeed puts it between double quotes
        return re.sub(r"[\\$`]", r"\\\g<0>", argument)
    return shlex.quote(argument)


def _program(name: str) -> str:
    """Find a command of this environment: its plain name where the shell finds the same, else its path."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not own.exists() and found is None:
        raise LaunchError(f"there is no command {name}, neither on PATH nor beside {sys.executable}")
    if found is not None and (not own.exists() or Path(found).samefile(own)):
        return name
    return str(own)


def _short(path: Path) -> str:
    """Write a path relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
