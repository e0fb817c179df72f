"""Starting processes and agreeing among them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.distributed import environment
from hybrid.distributed import world as distributed
from hybrid.distributed.environment import LAUNCHER_VARIABLES
from hybrid.distributed.lost_hosts import lost_peers_in_words
from hybrid.distributed.world import World
from hybrid.errors import TrainError


def test_a_half_set_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        TrainError, match="names RANK but not LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    ):
        distributed.start()


def test_one_process_alone_needs_no_collectives():
    world = World(0, 1, 0, 1, torch.device("cpu"))
    assert world.gather("a") == ["a"]
    assert world.gather_numbers([1.0, 2.0]).tolist() == [[1.0, 2.0]]
    with pytest.raises(OSError, match="gone"), world.all_ranks_or_none():
        raise OSError("gone")


def numbers() -> list[list[float]]:
    world = distributed.start(1)
    return world.gather_numbers([world.rank, float("inf") if world.rank else 0.5]).tolist()


def failing(rank: int, error: type[Exception]) -> str:
    world = distributed.start(1)
    try:
        world.rank0_only(lambda: None, no_timeout=True)
        with world.all_ranks_or_none():
            if world.rank == rank:
                raise error("no such file" if error is OSError else "")
    except (OSError, ValueError, SystemExit) as found:
        return f"{type(found).__name__}: {found}"
    return "went on"


@pytest.mark.ranks
def test_ranks_exchange_numbers(two_ranks: Any):
    assert two_ranks.run(numbers) == [[[0.0, 0.5], [1.0, float("inf")]]] * 2


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("rank", "error", "main"),
    [
        (0, OSError, "OSError: no such file"),
        (1, OSError, "TrainError: rank 1 of 2: no such file"),
        (1, ValueError, "TrainError: rank 1 of 2: ValueError"),
        (2, OSError, "went on"),
    ],
)
def test_a_problem_on_any_rank_stops_all_with_one_message(two_ranks: Any, rank: int, error: Any, main: str):
    found = two_ranks.run(failing, rank, error)
    assert found == [main, "went on" if rank == 2 else "SystemExit: 2"]


def place(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """The environment of rank 0 of 2, with changes."""
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**told, **changes}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; allowed: whole numbers of 1 or more"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "2"}, "RANK is '2'; allowed: whole numbers of 0 or more and below 2"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'"),
        (
            {"MASTER_PORT": "http"},
            "MASTER_PORT is 'http'; allowed: whole numbers of 1 or more and below 65536",
        ),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR no-such-host.invalid cannot be found"),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: str
):
    """huggingface/accelerate#953: before waiting for anybody."""
    place(monkeypatch, **changes)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    with pytest.raises(TrainError, match=re.escape(words)):
        distributed.start()


@pytest.mark.parametrize(
    ("told", "bound", "quota", "processes", "threads"),
    [
        ({}, 8, None, 1, None),  # torch's choice
        ({}, 8, None, 4, 2),
        ({}, 8, None, 16, 1),
        ({}, 4, None, 4, 4),  # a task bound to cores of its own, as srun does
        ({"CROSS_SIZE": "1"}, 4, None, 4, 1),  # the cores of a launcher started here, as in a container
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 4, None, 2, 2),
        ({"OMP_NUM_THREADS": "3"}, 8, None, 4, None),
        ({"OMP_NUM_THREADS": "1"}, 8, None, 4, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 8, None, 4, 2),
        ({}, 8, 2.5, 1, 2),
        ({}, 8, 4.0, 2, 2),
        ({}, 8, 0.5, 2, 1),
        ({}, 8, 64.0, 1, None),
    ],
)
def test_threads_are_shared_unless_they_were_given(
    monkeypatch, tmp_path, told, bound, quota, processes, threads
):
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: set(range(bound)))
    monkeypatch.setattr(environment, "cpu_quota", lambda: quota)
    (tmp_path / "environ").write_bytes(b"HOME=/\0OMP_WAIT_POLICY=passive\0")
    assert environment.default_threads(processes, tmp_path) == threads
    (tmp_path / "environ").write_bytes(b"HOME=/\0OMP_NUM_THREADS=1\0")
    own = "OMP_NUM_THREADS" in told  # and not torchrun's, which was started with it
    assert environment.default_threads(processes, tmp_path) == (None if own else threads)
    (tmp_path / "environ").unlink()
    assert environment.default_threads(processes, tmp_path) == threads


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        (
            "4:cpu,cpuacct:/job\n3:cpuset:/other\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        ("4:cpu:/docker/x\n", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("rubbish", {}, None),
    ],
)
def test_control_groups_limit_cores(tmp_path: Path, group: str, files: dict[str, str], quota: float | None):
    (tmp_path / "groups").write_text(group)
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    assert environment.cpu_quota(tmp_path / "groups", tmp_path / "mounted") == quota


def test_a_lost_process_is_told_in_words():
    with pytest.raises(TrainError, match="lost the connection to another process"), lost_peers_in_words():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    with pytest.raises(RuntimeError, match="shape"), lost_peers_in_words():
        raise RuntimeError("a shape of our own making")
