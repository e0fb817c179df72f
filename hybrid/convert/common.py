"""What every format reads to and writes from: a model's settings, its named tensors and its tokenizer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid import recipe as recipes
from hybrid.errors import ConvertError
from hybrid.model import HybridLM
from hybrid.recipe.schema import ModelSection

WRAPPERS = ("module.", "model.", "_orig_mod.", "_forward_module.")
"""What wrappers of a model put before the names of all its parameters."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is read when it is needed, so that few are in memory at once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> LazyTensor:
        """Wrap a tensor that is at hand (or in a file mapped to memory)."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.detach)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> LazyTensor:
        known = math.prod(size for size in shape if size >= 0)
        shape = tuple(size if size >= 0 else self.numel() // known for size in shape)
        return replace(self, shape=shape, read=lambda: self.read().reshape(shape))

    def flatten(self) -> LazyTensor:
        return self.reshape(-1)

    def new_zeros(self, *shape: int) -> LazyTensor:
        return LazyTensor(shape, self.dtype, lambda: torch.zeros(shape, dtype=self.dtype))


Tensors = dict[str, LazyTensor]


@dataclass
class Model:
    """A model on its way from one format to another."""

    section: ModelSection
    """The model section of its recipe, complete: every option of every layer is written out."""
    tensors: Tensors
    """The tensors of `HybridLM.state_dict()`, by its names."""
    tokenizer: dict[str, bytes] = field(default_factory=dict)
    """Files of the tokenizer, by name; `tokenizer.model` is the sentencepiece model of our tokenizer."""
    source_names: dict[str, str] = field(default_factory=dict)
    """Our name -> the source's, where they differ."""
    created: dict[str, str] = field(default_factory=dict)
    """Tensor that the source does not have -> why it is there."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Tensor of the source that is not carried over -> why."""
    notes: list[str] = field(default_factory=list)
    """What else the report has to say."""
    place: Path | None = None
    """The checkpoint that was read, where the source has several."""


@dataclass(frozen=True)
class Options:
    """What is said about a source on the command line."""

    recipe: str | None = None
    """A recipe whose model section describes the source, where it holds none."""
    settings: dict[str, str] = field(default_factory=dict)
    """Keys of the source's own config."""


@dataclass(frozen=True)
class Format:
    """One format of models, and what can be done with it."""

    words: str
    recognise: Callable[[Path], str | None]
    """What marks a path as this format, in words; None: it is another."""
    read: Callable[[Path, Options], Model]
    write: Callable[[Model, Path, Callable[[Path, Tensors], None]], None] | None = None
    """Fill an empty folder; the third argument writes safetensors shards with an index into a folder."""
    logits: Callable[[Path, Tensor], Tensor] | None = None
    """Compute logits fp32 `[1, T, V]` of ids `[1, T]` by other code than ours; None: `HybridLM` does."""


def meta_model(section: ModelSection) -> HybridLM:
    """Build the model of a section without memory for its parameters."""
    with torch.device("meta"):
        return HybridLM(section, recipes.layer_specs(section))


def complete(section: ModelSection, overrides: Collection[str] = ()) -> ModelSection:
    """Write every option of a model section out, after `model.key=value` texts have changed it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source"
        path.write_text(recipes.to_yaml({"model": section}), encoding="utf-8")
        try:
            return recipes.load(path, list(overrides), model_only=True).model
        except recipes.RecipeError as error:  # without the file's name, which nobody knows
            raise recipes.RecipeError(error.problems) from None


def unwrapped(tensors: Tensors) -> Tensors:
    """Take off what wrappers (DDP, torch.compile, Lightning) put before every name."""
    while prefix := next((p for p in WRAPPERS if tensors and all(n.startswith(p) for n in tensors)), None):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def fit(tensors: Tensors, section: ModelSection, source: Any) -> Model:
    """Check tensors in our names against the section that they belong to.

    Raises ConvertError that lists every missing, unknown or misshapen one, and a second output head that
    differs from the embedding it is tied to.
    """
    wanted, model = meta_model(section).state_dict(), Model(section, dict(tensors))
    head = model.tensors.get("head.weight")
    if head is not None and "head.weight" not in wanted and "embedding.weight" in tensors:
        if not same_bits(head.read(), tensors["embedding.weight"].read()):
            raise ConvertError(
                f"{source}: head.weight differs from embedding.weight, to which model.tie_embeddings=true "
                "ties it: give a recipe with tie_embeddings: false"
            )
        del model.tensors["head.weight"]
        model.dropped["head.weight"] = "the same weight as embedding.weight, to which it is tied"
    refuse_misfits(model.tensors, wanted, source)
    model.tensors = {name: model.tensors[name] for name in wanted}
    return model


def refuse_misfits(
    tensors: Mapping[str, Any], wanted: Mapping[str, Any], source: Any, shown: Callable[[str], str] = str
) -> None:
    """Raise ConvertError naming (as `shown` does) every missing, unknown, misshapen or non-float tensor."""
    problems = [f"missing tensor '{shown(name)}'" for name in wanted if name not in tensors]
    for name, tensor in tensors.items():
        if name not in wanted:
            problems.append(f"unknown tensor '{shown(name)}'")
        elif (found := tuple(tensor.shape)) != (shape := tuple(wanted[name].shape)):
            problems.append(f"tensor '{shown(name)}' is {found}, the config asks for {shape}")
        elif not tensor.dtype.is_floating_point:
            problems.append(f"tensor '{shown(name)}' is {tensor.dtype}, weights are floating-point numbers")
    if problems:
        lines = [*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])]
        raise ConvertError(f"{source} does not fit the config:" + "".join(f"\n  {line}" for line in lines))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (nan and -0.0 too)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))


def short_list(names: Collection[str]) -> str:
    """List the first names; the report's file has all."""
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(list(names)[:12]) + more
