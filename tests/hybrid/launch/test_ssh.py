"""What is handed to DeepSpeed for other hosts, and what is checked before."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hybrid.cli.main import main
from hybrid.launch.plan import Request, plan

AWKWARD = [
    "model.pattern=(R3K)6", "train.output=my run", "train.output=a'b", "a=$HOME", "a=$HOME b", 'a="b"',
    'a="b" c', "a=%n %h%%%u%x", "a=%n", "a=`id` b", "a=b\\", "a=b\\ c", "a=b;c", "a=*", "a={b: [1, 2]}",
    "a=!b c", "a=~", "a=", "a=b\nc", "a=b\tc",
]  # fmt: skip


def on_a_host(argv: list[str]) -> str:
    """What DeepSpeed's command line becomes on a host: its own runner's words, as pdsh passes them on."""
    from deepspeed.launcher.multinode_runner import PDSHRunner
    from deepspeed.launcher.runner import parse_args

    runner = PDSHRunner(parse_args(argv[1:]), "world")
    runner.add_export("NAME", "some value")
    words, _, _ = runner.get_cmd({}, {"worker-0": [0], "worker-1": [0]})
    assert words[:6] == ["pdsh", "-S", "-f", "1024", "-w", "worker-0,worker-1"]
    values = {"h": "worker-1", "n": "1", "u": "root", "%": "%"}
    return re.sub("%([hnu%])", lambda found: values[found[1]], " ".join(words[6:]))


def test_every_argument_arrives_as_it_is(tmp_path: Path):
    (tmp_path / "hosts").write_text("worker-0 slots=1\nworker-1 slots=1\n")
    made = plan(Request("my recipe.yaml", tuple(AWKWARD), hostfile=str(tmp_path / "hosts")))
    assert made.from_here is not None
    command = on_a_host(made.from_here.argv)
    launch, _, training = command.partition(" hybrid ")
    assert " --node_rank=1 --master_addr=worker-0 --master_port=29500 --module" in launch
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-c", f"printf '%s\\0' {training}"], capture_output=True, text=True)
        assert done.stdout.split("\0")[:-1] == ["train", "my recipe.yaml", *AWKWARD]
    exported = launch.partition("cd ")[0]
    done = subprocess.run(["sh", "-c", f'{exported} echo "$NAME"'], capture_output=True, text=True)
    assert done.stdout == "some value\n"


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Launch on two hosts, from a folder and with programs of our own; returns what was said."""
    monkeypatch.setattr("os.execvpe", lambda *_: pytest.fail("started"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in (("pdsh", ""), ("ssh", '#!/bin/sh\necho "ssh: $*" >&2; exit 255\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")

    def said() -> str:
        assert main(["launch", "debug", "--hostfile", str(tmp_path / "hosts")]) == 2
        return capsys.readouterr().err

    return said


def test_hosts_that_ssh_does_not_reach_are_all_named(launch):
    said = launch()
    assert "ssh does not get into 127.0.0.1 (ssh: -oBatchMode=yes -oConnectTimeout=10" in said
    assert "127.0.0.2 (ssh: " in said


@pytest.mark.parametrize("line", ["", "# mine", "NCCL_DEBUG INFO", "A=\udce9"])
def test_a_line_of_deepspeed_env_that_deepspeed_cannot_read_is_quoted(launch, tmp_path, line):
    path = tmp_path / ".deepspeed_env"
    path.write_bytes(f"A=1\n{line}\nB=2\n".encode("utf-8", "surrogateescape"))
    assert f"{path}, line 2: {line!r}: expected NAME=VALUE" in launch()


def test_a_folder_that_cannot_be_named_is_refused(launch, tmp_path, monkeypatch):
    folder = tmp_path / "my folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert f"the path of this folder is '{folder}', which DeepSpeed cannot pass through ssh" in launch()
