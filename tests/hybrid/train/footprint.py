"""What a training step really keeps and sends, measured inside a rank."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import tiny


class Found(NamedTuple):
    """Of one step, by one rank."""

    parameters: int
    kept: int
    """Bytes of all tensors just before the update, when the activations are gone."""
    sent: dict[str, int]
    """Collective -> bytes of the whole tensors."""


class _Sent(TorchDispatchMode):
    """Counts the tensors given to collectives: outputs of an all-gather, inputs of the others."""

    WHOLE: ClassVar = {"allreduce_": 0, "_allgather_base_": 0, "_reduce_scatter_base_": 1}
    """Collective -> which argument is the whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, _ = str(func).split(".")
        if namespace == "c10d":
            self.bytes[name] += _bytes(args[self.WHOLE.get(name, 0)])
        return func(*args, **(kwargs or {}))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def _tensors() -> list[Tensor]:
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Tensor) and thing.device.type == "cpu"]


def _held(before: list[weakref.ref[Tensor]]) -> int:
    """Bytes of the memory of all tensors but those that were there before."""
    old = [tensor for tensor in (reference() for reference in before) if tensor is not None]
    known = {0, *(tensor.untyped_storage().data_ptr() for tensor in old)}
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _tensors()}
    return sum(size for place, size in found.items() if place not in known)


def measure(path: Path, output: Path, **overrides: Any) -> Found:
    """Train two steps of the recipe in `path` (its data prepared) and look at the second."""
    from hybrid import recipe as recipes
    from hybrid.data.loader import Loader
    from hybrid.distributed import world as distributed
    from hybrid.model import HybridLM
    from hybrid.train.engine import Engine
    from hybrid.train.step import Step

    world = distributed.start(1)
    recipe = tiny.load(path, output, **overrides)
    geometry = recipes.batch_geometry(recipe, world.size)
    before = [weakref.ref(tensor) for tensor in _tensors()]
    engine = Engine(HybridLM.from_recipe(recipe), recipe, geometry, world)
    loader = Loader(
        recipe.data, seed=0, sequences=geometry.micro_batch, rank=world.rank, world=world.size,
        start_sample=0, lanes=recipe.train.batch_size,
    )  # fmt: skip
    held: list[int] = []
    update = engine.deepspeed.step

    def watched() -> None:
        held.append(_held(before))
        update()

    def take() -> None:
        engine.set_rates(1.0)
        Step(engine, world, [next(loader) for _ in range(geometry.accumulation)]).take()

    take()
    engine.deepspeed.step = watched
    with _Sent() as sent:
        take()
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
    engine.close()
    return Found(parameters, max(held), dict(sent.bytes))
