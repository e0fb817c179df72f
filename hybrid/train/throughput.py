"""How fast steps go."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.distributed.world import World
from hybrid.recipe.schema import Recipe

from . import metrics as monitor


@dataclass
class _Sums:
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0

    def add(self, seconds: float, waited: float, tokens: int) -> None:
        self.steps += 1
        self.seconds += seconds
        self.waited += waited
        self.tokens += tokens


class Pace:
    """Times steps, over the whole call and since the last report; validation and checkpoints are left out."""

    def __init__(self, recipe: Recipe, flops_per_token: float, world: World) -> None:
        """`flops_per_token`: of training, at the recipe's context, as if no document ended in a window."""
        self._world = world
        self._flops = flops_per_token
        peak = (
            monitor.peak_flops(recipe.monitor, world.device, recipe.train.precision) if world.main else None
        )
        self._peak = peak * world.size if peak else None
        self._all, self._window = _Sums(), _Sums()

    def add(self, seconds: float, waited: float, tokens: int) -> None:
        self._all.add(seconds, waited, tokens)
        self._window.add(seconds, waited, tokens)

    @property
    def seconds_per_step(self) -> float:
        return self._all.seconds / max(1, self._all.steps)

    @property
    def tokens_per_second(self) -> float:
        return self._all.tokens / self._all.seconds if self._all.seconds else 0.0

    def report(self) -> dict[str, float]:
        """Values over the steps since the last call; every rank calls it. Memory is the neediest rank's."""
        window, self._window = self._window, _Sums()
        flops = self._flops * window.tokens / window.seconds
        memory = self._world.gather_numbers([monitor.memory_bytes(self._world.device)]).max()
        values = {
            "speed/tokens_per_second": window.tokens / window.seconds,
            "speed/step_seconds": window.seconds / window.steps,
            "speed/data_wait": window.waited / window.seconds,
            "speed/tflops": flops / 1e12,
            "memory/peak_gib": float(memory) / 2**30,
        }
        if self._peak:
            values["speed/utilisation"] = flops / self._peak
        return values
