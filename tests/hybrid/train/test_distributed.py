"""Starting processes and agreeing among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid.train import distributed
from hybrid.train.distributed import LAUNCHER_VARIABLES, TrainError, World


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
    with pytest.raises(OSError, match="gone"), world.together():
        raise OSError("gone")


def numbers() -> list[list[float]]:
    world = distributed.start(1)
    return world.gather_numbers([world.rank, float("inf") if world.rank else 0.5]).tolist()


def failing(rank: int, error: type[Exception]) -> str:
    world = distributed.start(1)
    try:
        world.on_main(lambda: None, patient=True)
        with world.together():
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
