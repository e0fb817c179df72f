"""From `hybrid launch`'s options to commands; mistakes are told before anything starts."""

import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

from hybrid.cli.main import main
from hybrid.errors import LaunchError
from hybrid.launch import start
from hybrid.launch.hosts import Host
from hybrid.launch.plan import Request, plan
from hybrid.launch.report import commands, layout

ROOT = Path(__file__).parents[3]
HOSTS = "worker-0 slots=8\nworker-1 slots=4\n"


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return str(path)


def words(command) -> list[str]:
    """The command's arguments, the launcher by its plain name."""
    first, *rest = command.argv
    return [Path(first).name, *rest]


def test_one_machine_with_deepspeed():
    made = plan(Request("debug", ("train.steps=2",), gpus=2))
    *start, port = words(made.from_here)[:6]
    assert start == ["deepspeed", "--quiet", "--num_gpus", "2", "--master_port"]
    assert int(port) == made.port
    assert words(made.from_here)[6:] == ["--module", "hybrid", "train", "debug", "train.steps=2"]
    assert made.commands == [made.from_here]
    assert made.processes == 2


def test_one_machine_with_torchrun():
    made = plan(Request("debug", gpus=2, launcher="torchrun"))
    expected = ["torchrun", "--standalone", "--nproc_per_node", "2", "-m", "hybrid", "train", "debug"]
    assert words(made.from_here) == expected
    made = plan(Request("debug", gpus=2, launcher="torchrun", master_port=4000))
    assert words(made.from_here)[1:5] == ["--master_addr", "127.0.0.1", "--master_port", "4000"]


def test_a_hostfile_with_deepspeed(hostfile):
    made = plan(Request("debug", ("train.output=my run",), hostfile=hostfile))
    meeting = ["--master_addr", "worker-0", "--master_port", "29500"]
    module = ["--module", "hybrid", "train", "debug", "train.output=my run"]
    start = ["deepspeed", "--quiet", "--hostfile", hostfile]
    assert words(made.from_here) == [*start, *meeting, *module]
    assert [command.where for command in made.commands] == ["worker-0", "worker-1"]
    for rank, command in enumerate(made.commands):
        assert words(command) == [*start, "--no_ssh", "--node_rank", str(rank), *meeting, *module]
        assert made.command(rank) == command
    assert made.command(None) == made.from_here
    assert made.processes == 12
    assert shlex.split(str(made.from_here)) == made.from_here.argv


def test_a_single_remote_host_is_not_taken_for_this_one(hostfile):
    """DeepSpeed starts a hostfile's only host here, whatever its name."""
    made = plan(Request("debug", hostfile=hostfile, nodes=1, gpus=2))
    assert words(made.from_here)[4:9] == ["--num_nodes", "1", "--num_gpus", "2", "--force_multi"]
    assert made.hosts == [Host("worker-0", (0, 1))]
    filtered = plan(Request("debug", hostfile=hostfile, include="worker-1:0,3"))
    assert words(filtered.from_here)[2:7] == [
        "--include",
        "worker-1:0,3",
        "--hostfile",
        hostfile,
        "--force_multi",
    ]
    assert filtered.master == "worker-1"
    assert filtered.hosts == [Host("worker-1", (0, 3))]


def test_a_hostfile_with_torchrun(hostfile):
    made = plan(Request("debug", hostfile=hostfile, launcher="torchrun", master_port=4000))
    assert made.from_here is None
    for rank, slots in enumerate((8, 4)):
        assert words(made.command(rank)) == [
            "torchrun", "--nnodes", "2", "--nproc_per_node", str(slots), "--node_rank", str(rank),
            "--master_addr", "worker-0", "--master_port", "4000", "-m", "hybrid", "train", "debug",
        ]  # fmt: skip
    with pytest.raises(LaunchError, match="run this on each with --node-rank 0 to 1"):
        made.command(None)


def test_nodes_without_names_get_one_command_for_all():
    made = plan(Request("debug", nodes=512, gpus=8))
    assert made.processes == 4096
    (command,) = made.commands
    assert str(command).endswith(
        'torchrun --nnodes 512 --nproc_per_node 8 --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" '
        "--master_port 29500 -m hybrid train debug"
    )
    with pytest.raises(LaunchError, match="on each node --master-addr and --node-rank"):
        made.command(3)
    known = plan(Request("debug", nodes=512, gpus=8, master_addr="10.0.0.1"))
    assert len(known.commands) == 512
    assert words(known.command(511))[5:9] == ["--node_rank", "511", "--master_addr", "10.0.0.1"]


def test_slurm_is_given_the_script(monkeypatch):
    monkeypatch.chdir(ROOT)
    made = plan(Request("debug", ("train.steps=2",), launcher="slurm", nodes=4, gpus=8))
    assert str(made.command(None)) == (
        "sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm.sbatch debug train.steps=2"
    )
    assert made.processes == 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 2, "launcher": "deepspeed", "gpus": 1}, "the deepspeed launcher needs their names"),
        ({"hostfile": "HOSTS", "nodes": 3}, "--nodes is 3, but there are 2 hosts"),
        ({"hostfile": "HOSTS", "gpus": 8}, "--gpus is 8, but worker-1 has 4 slots"),
        ({"hostfile": "HOSTS", "gpus": 1, "include": "worker-0"}, "give one kind"),
        ({"hostfile": "HOSTS", "node_rank": 2}, "--node-rank is 2, but there are 2 nodes: 0 to 1"),
        ({"hostfile": "HOSTS", "include": "worker-1:1", "launcher": "torchrun"}, "not slots 1 of worker-1"),
        ({"hostfile": "nowhere"}, "there is no hostfile nowhere"),
        ({"launcher": "slurm", "nodes": 2}, "needs --gpus"),
        (
            {"launcher": "slurm", "gpus": 2, "hostfile": "HOSTS"},
            "--hostfile has no place with --launcher slurm",
        ),
        ({"launcher": "slurm", "gpus": 2, "node_rank": 0}, "--node-rank has no place with --launcher slurm"),
    ],
)
def test_options_that_do_not_go_together(hostfile, options, message):
    options = {name: hostfile if value == "HOSTS" else value for name, value in options.items()}
    with pytest.raises(LaunchError, match=message):
        plan(Request("debug", **options))


def test_without_gpus_their_number_must_be_said(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(LaunchError, match="no GPU: say with --gpus"):
        plan(Request("debug"))
    with pytest.raises(LaunchError, match="this machine has none"):
        plan(Request("debug", include="localhost:0"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert plan(Request("debug")).processes == 4
    made = plan(Request("debug", exclude="localhost:0"))
    assert made.hosts == [Host("localhost", (1, 2, 3))]
    assert words(made.from_here)[2:4] == ["--exclude", "localhost:0"]


def test_the_layout_shows_ranks_and_sequences():
    pool = [Host("a", (0, 1, 2, 3)), Host("b", (0, 1))]
    assert layout(pool, 1).splitlines() == [
        "Layout: 2 nodes, 6 ranks = 6 data-parallel x 1 per sequence",
        "  node  ranks  data-parallel places",
        "  a     0-3    0-3",
        "  b     4-5    4-5",
    ]
    assert layout(pool, 2).splitlines()[2:] == ["  a     0-3    0-1", "  b     4-5    2"]
    split = layout([Host("a", (0, 1, 2)), Host("b", (0,))], 2)
    assert "the 2 ranks of a sequence do not stay on one node (a, b)" in split
    many = layout([Host(f"node {i}", tuple(range(8))) for i in range(512)], 8)
    assert [line.split()[:2] for line in many.splitlines()[2:]] == [
        ["node", "0"], ["node", "1"], ["..."], ["node", "511"],
    ]  # fmt: skip
    assert "4088-4095" in many


def test_many_commands_are_shortened():
    text = commands(plan(Request("debug", nodes=100, gpus=1, master_addr="10.0.0.1")))
    assert text.count("torchrun") == 3
    assert "... 97 more ..." in text


# The command itself


def test_a_dry_run_starts_nothing_and_shows_everything(hostfile, capsys, monkeypatch):
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(start, "require_addresses", lambda *_: pytest.fail("looked up"))
    arguments = ["debug", "train.batch_size=24", "--hostfile", hostfile, "--dry-run"]
    assert main(["launch", *arguments]) == 0
    said = capsys.readouterr().out
    for part in ("--no_ssh --node_rank 1", "2 nodes, 12 ranks", "24 sequences = 12 data-parallel x 2",
                 "Memory per process", "Communication"):  # fmt: skip
        assert part in said


def test_a_batch_that_does_not_fit_the_hosts_shows_all_numbers(hostfile, capsys):
    """bigcode-project/starcoder#41: the check knows all processes of all nodes."""
    assert main(["launch", "debug", "train.batch_size=8", "--hostfile", hostfile]) == 2
    assert (
        "8 sequences do not divide over 12 processes / 1 ranks per sequence = 12 data-parallel"
        in capsys.readouterr().err
    )
    options = ["--nodes", "1", "--gpus", "2", "--dry-run"]
    good = ["debug", "train.batch_size=8", "train.micro_batch_size=2"]
    assert main(["launch", *good, *options]) == 0
    assert "8 sequences = 2 data-parallel x 2 micro-batch x 2 accumulation" in capsys.readouterr().out
    assert main(["launch", *good, "parallel.sequence=2", *options]) == 0
    assert "8 sequences = 1 data-parallel x 2 micro-batch x 4 accumulation" in capsys.readouterr().out
    bad = ["debug", "train.batch_size=8", "train.micro_batch_size=3"]
    assert main(["launch", *bad, *options]) == 2
    assert "2 x 3 = 6, and 8 / 6 = 1.333" in capsys.readouterr().err


def test_the_readmes_four_commands(capsys, monkeypatch):
    """From a laptop to nodes: what it shows is accepted, and the last two are one run."""
    monkeypatch.chdir(ROOT)
    section = (ROOT / "docs" / "scaling.md").read_text().split("\n## ")[0]
    lines = re.findall(r"^hybrid .*", section, re.MULTILINE)
    train, machine, dry, real = (shlex.split(line, comments=True) for line in lines)
    assert train == ["hybrid", "train", "recipes/quickstart.yaml"]
    assert dry == [*real, "--dry-run"]
    for command, ranks in ((machine, 2), (real, 16)):
        assert command[:3] == ["hybrid", "launch", "recipes/quickstart.yaml"]
        assert main([*command[1:], "--dry-run"]) == 0
        assert f"{ranks} ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "'0' is not a whole number of 1 or more"),
        (["--gpus", "2", "--master-port", "70000"], "'70000' is not a port's number, 1 to 65535"),
        (["--gpus", "2", "--node-rank", "-1"], "is not a whole number of 0 or more"),
        (["--hostfile", "nowhere"], "there is no hostfile nowhere"),
        (["--gpus", "2", "model.patern=F"], "model.patern"),
    ],
)
def test_mistakes_end_before_anything_starts(options, message, capsys, monkeypatch):
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("started"))
    assert main(["launch", "debug", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_master_without_address_is_told_and_nothing_starts(tmp_path, capsys, monkeypatch):
    """deepspeedai/DeepSpeed#2612"""
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("started"))
    (tmp_path / "hosts").write_text("host-b.invalid slots=1\n127.0.0.1 slots=1\n")
    launch = ["launch", "debug", "--hostfile", str(tmp_path / "hosts")]
    assert main([*launch, "--node-rank", "0"]) == 2
    assert "no network address is known for host-b.invalid" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(launch) == 2
    assert "pdsh, which is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_busy_port_is_named(launcher, tmp_path, capsys, monkeypatch):
    """huggingface/accelerate#953: before anything starts; a run that is not told a port takes a free one."""
    started = []
    monkeypatch.setattr("os.execvpe", lambda *given: started.append(given))
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        arguments = ["launch", "debug", "--launcher", launcher, "--master-port", port]
        assert main([*arguments, "--gpus", "2"]) == 2
        assert f"port {port} of 127.0.0.1 is busy" in capsys.readouterr().err
        assert main([*arguments, "--hostfile", str(tmp_path / "hosts"), "--node-rank", "0"]) == 2
        assert f"port {port} of 127.0.0.1 is busy" in capsys.readouterr().err
    assert not started
    main(["launch", "debug", "--launcher", launcher, "--gpus", "2"])
    ((program, argv, environment),) = started
    assert environment["PYTHONSAFEPATH"]  # a folder called hybrid is not the package
    assert [program, *argv[1:3]] == [argv[0], "-m", "hybrid.launch.supervise"]
    assert Path(argv[3]).name == launcher
    assert argv[-3:] == ["hybrid", "train", "debug"]
