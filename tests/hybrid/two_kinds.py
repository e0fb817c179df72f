"""Two kinds of layers with known options, so that tests are about recipes and not about our mixers."""

import dataclasses
from typing import Literal

import pytest

from hybrid.layers import LayerError, Mixer
from hybrid.recipe import RecipeError, load

BASE = """\
model: {pattern: K2F, hidden_size: 32}
data:
  folder: runs/data
  sources:
    code: {paths: ["stdlib:"]}
    books: {paths: ["bible:"], weight: 0.5}
optimizer: {lr: 1e-3}
train: {steps: 10, batch_size: 8, output: runs/out}
"""


@dataclasses.dataclass
class SlotOptions:
    chunk: int = 64
    exponent: float = 0.5
    num_heads: int | None = None
    budget: Literal["fixed", "power_law"] = "fixed"
    label: str = ""
    sizes: list[int] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        if self.chunk < 1:
            raise LayerError(f"chunk is {self.chunk}; allowed: 1 or more")


@dataclasses.dataclass
class WideOptions:
    num_heads: int = 4


class Slots(Mixer):
    kind = "kvm"
    Options = SlotOptions

    @classmethod
    def value_width(cls, options, site):
        return options.num_heads

    @classmethod
    def check_sharding(cls, options, site, size, tokens):
        pass


class Wide(Mixer):
    kind = "full"
    Options = WideOptions

    @classmethod
    def check(cls, options, site):
        if site.hidden_size % options.num_heads:
            raise LayerError(
                f"hidden_size {site.hidden_size} is no multiple of num_heads {options.num_heads}"
            )

    @classmethod
    def check_sharding(cls, options, site, size, tokens):
        if options.num_heads % size:
            raise LayerError(f"layer {site.layer} has {options.num_heads} heads for {tokens} tokens")


def refused(path, *overrides, **more):
    with pytest.raises(RecipeError) as caught:
        load(path, overrides, **more)
    return caught.value.problems
