"""What all tests share: the pools of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .ranks import RankPool


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
