"""What all tests share: one thread a process, a layer of another package, and the pools of ranks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from . import third_party
from .ranks import RankPool

# Tensors here are tiny, and several test processes run at once: more threads would wait for each other. The
# environment is for the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton looks at this when it is imported: its interpreter runs kernels here, on the CPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test asks for the kinds of layers."""
    folder = tempfile.TemporaryDirectory(prefix="third_party_")
    config.add_cleanup(folder.cleanup)
    third_party.install(Path(folder.name))
    sys.path.insert(0, folder.name)


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        return pools.setdefault(size, RankPool(size))

    yield pool
    for one in pools.values():
        one.close()


@pytest.fixture(scope="session")
def two_ranks(rank_pools: Callable[[int], RankPool]) -> RankPool:
    """Two processes joined by gloo, started at first use: `two_ranks.run(function, *args)`."""
    return rank_pools(2)


@pytest.fixture(scope="session")
def four_ranks(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(4)
