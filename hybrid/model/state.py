"""The state of a model between two calls: a value that can be copied, moved, counted, saved and loaded.

A state's file is one of safetensors whose metadata holds everything but tensors as JSON, and a checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hybrid.errors import UserError
from hybrid.files import replacing
from hybrid.layers import MixerState, kinds

FORMAT = "hybrid-state-2"


class StateError(UserError):
    """A state that does not fit the model or the call, or a file that holds none; the message says which."""


@dataclass
class BlockState(MixerState):
    """State of one block: the mixer's, and the last token the feed-forward saw (for its token shift)."""

    mixer: MixerState | None = None
    last: Tensor | None = None
    """`[B, C]`, or None without token shift."""


@dataclass
class HybridState:
    """A model's state after `position` tokens of every sequence of a batch.

    With gradients enabled a call leaves the state it is given alone; without, the call takes its storage
    over (see `MixerState`), and using it again raises: `fork()` first to go on twice from one point.
    """

    layers: list[BlockState]
    position: int
    layout: tuple[str, ...] = field(default=(), repr=False)
    """One line per layer and one for the backbone, to tell states of different models apart."""

    @property
    def batch(self) -> int:
        """Sequences; 0 when no layer remembers anything."""
        return next((tensor.shape[0] for tensor in self.tensors().values()), 0)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def tensors(self) -> dict[str, Tensor]:
        """Collect every tensor as `layers.N.FIELD`."""
        named = [(f"layers.{i}.", layer.tensors()) for i, layer in enumerate(self.layers)]
        return {prefix + name: tensor for prefix, own in named for name, tensor in own.items()}

    def map(self, change: Callable[[Tensor], Tensor]) -> HybridState:
        """Change every tensor."""
        return replace(self, layers=[layer.map(change) for layer in self.layers])

    def detach(self) -> HybridState:
        return self.map(lambda t: t.detach())

    def to(self, device: torch.device | str) -> HybridState:
        return self.map(lambda t: t.to(device))

    def fork(self) -> HybridState:
        """Make an independent copy; both can be continued."""
        return self.map(lambda t: t.clone())

    def refuse_other(self, layout: tuple[str, ...], batch: int) -> None:
        """Raise StateError unless the state belongs to a model of this layout and a batch of this size."""
        if self.layout != layout:
            raise StateError("the state is another model's: " + _difference(self.layout, layout))
        for layer in self.layers:
            if layer.mixer is not None:
                layer.mixer._refuse_spent()
        if self.batch not in (0, batch):
            raise StateError(f"the state holds {self.batch} sequences, the call has {batch}")

    def select(self, rows: Sequence[int]) -> HybridState:
        """Copy the state of these sequences of the batch, in that order; repeats are allowed."""
        absent = [row for row in rows if not 0 <= row < self.batch]
        if absent and self.batch:
            raise StateError(f"row {absent[0]} is wanted of a state of {self.batch} sequences")
        return replace(self, layers=[layer.select(rows) for layer in self.layers])

    @staticmethod
    def concatenate(states: Sequence[HybridState]) -> HybridState:
        """Join the sequences of all states to one batch.

        StateError unless they are of one kind of model and at one position: sequences at different positions
        go on together as a packed row, which takes a list of states.
        """
        if not states:
            raise StateError("no state is given to be concatenated")
        first = states[0]
        for state in states[1:]:
            if state.layout != first.layout:
                raise StateError(
                    "the states are of different models: "
                    + _difference(state.layout, first.layout, "the other")
                )
            if state.position != first.position:
                raise StateError(
                    f"the states are at positions {first.position} and {state.position}; to go on with "
                    "sequences at different positions together, give a packed row the list of their states"
                )
            _refuse_unlike(state.tensors(), first.tensors())
        layers = [MixerState.concatenate(layers) for layers in zip(*(s.layers for s in states), strict=True)]
        return replace(first, layers=layers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file; it appears whole or not at all."""
        write_file(path, *self.parts())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> HybridState:
        """Read what `save` wrote. Raises StateError when the file is none of ours, damaged, or holds a layer
        that is not installed."""
        return cls.of_parts(*read_file(path, device), path)

    def parts(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Take the state apart into texts and tensors, all that a file holds of it."""
        texts = {
            "position": str(self.position),
            "layout": json.dumps(self.layout),
            "layers": json.dumps([_describe(layer) for layer in self.layers]),
        }
        return texts, self.tensors()

    @classmethod
    def of_parts(cls, texts: dict[str, str], tensors: dict[str, Tensor], path: Any) -> HybridState:
        """Put a state together again from its parts; `path` is where they come from, for StateError."""
        try:
            described = json.loads(texts["layers"])
            layers = [_build(one, f"layers.{i}", tensors, path) for i, one in enumerate(described)]
            position = int(texts["position"])
            if position < 0:
                raise ValueError(f"position is {position}")
            return cls(layers, position, tuple(json.loads(texts["layout"])))
        except StateError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise StateError(f"{path}: the state is damaged ({type(error).__name__}: {error})") from error


def _refuse_unlike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Raise StateError unless the tensors differ in batch and values only."""
    for name in sorted(wanted.keys() | found.keys()):
        pair = (found.get(name), wanted.get(name))
        like = [None if x is None else (*x.shape[1:], x.dtype, x.device) for x in pair]
        if like[0] != like[1]:
            raise StateError(f"the states differ in {name}, of one sequence: {like[0]} and {like[1]}")


def _difference(found: tuple[str, ...], wanted: tuple[str, ...], owner: str = "this model") -> str:
    if len(found) != len(wanted):
        return f"it has {len(found) - 1} layers, {owner} {len(wanted) - 1}"
    pairs = enumerate(zip(found, wanted, strict=True))
    index, (state, model) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    place = "its backbone" if index == 0 else f"its layer {index - 1}"
    return f"{place} is {state}, {owner}'s is {model}"


def _describe(state: MixerState) -> dict[str, Any]:
    """Write everything of a state but its tensors as JSON values."""
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if f.name.startswith("_"):
            continue  # bookkeeping that a call makes anew
        if isinstance(value, MixerState):
            value = _describe(value)
        elif isinstance(value, Tensor):
            value = {"tensor": True}
        elif not (value is None or isinstance(value, int | float | str)):
            kind = type(value).__name__
            raise StateError(f"{type(state).__name__}.{f.name} is a {kind}, which cannot be saved")
        fields[f.name] = value
    return {"class": _class_name(type(state)), "fields": fields}


def _class_name(cls: type[MixerState]) -> str:
    """Name a class as files do: with the package, but not the module, which may change."""
    return f"{cls.__module__.split('.')[0]}.{cls.__qualname__}"


def _build(described: dict[str, Any], name: str, tensors: dict[str, Tensor], path: Any) -> Any:
    """Build what `_describe` wrote. Only classes of installed layers are ever built."""
    known = _state_classes()
    if described["class"] not in known:
        raise StateError(f"{path}: {name} is a '{described['class']}', of which no layer is installed")
    fields: dict[str, Any] = {}
    public = {f.name for f in dataclasses.fields(known[described["class"]]) if not f.name.startswith("_")}
    if described.keys() != {"class", "fields"} or described["fields"].keys() != public:
        raise ValueError(f"{name} has other fields than {', '.join(sorted(public))}")
    for key, value in described["fields"].items():
        if isinstance(value, dict):
            inner = f"{name}.{key}"
            value = tensors[inner] if value == {"tensor": True} else _build(value, inner, tensors, path)
        fields[key] = value
    return known[described["class"]](**fields)


def _state_classes() -> dict[str, type[MixerState]]:
    kinds()  # imports every installed layer
    found: dict[str, type[MixerState]] = {}
    waiting = [MixerState]
    while waiting:
        cls = waiting.pop()
        found[_class_name(cls)] = cls
        waiting.extend(cls.__subclasses__())
    return found


def write_file(path: str | os.PathLike[str], texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write texts and tensors to one file that appears whole or not at all. Raises OSError."""
    contiguous = torch.contiguous_format  # a copy, as safetensors refuses views of one storage
    own = {name: tensor.detach().cpu().clone(memory_format=contiguous) for name, tensor in tensors.items()}
    texts = {**texts, "format": FORMAT}
    with replacing(Path(path)) as file:
        file.write(save(own, {**texts, "sha256": _digest(texts, own)}))


def read_file(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read texts and tensors of a file that `write_file` wrote. StateError when it is none, or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise StateError(f"{path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: cannot be read as a state ({error})") from error
    if texts.get("format") != FORMAT:
        found = texts.get("format")
        raise StateError(f"{path}: not a model state (format {found!r}, expected '{FORMAT}')")
    if texts.pop("sha256", None) != _digest(texts, tensors):
        raise StateError(
            f"{path}: the state is damaged (its content does not have the checksum it was given)"
        )
    return texts, {name: tensor.to(device) for name, tensor in tensors.items()}


def _digest(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    return digest(tensors, json.dumps(sorted(texts.items())).encode())


def digest(tensors: Mapping[str, Tensor], first: bytes = b"") -> str:
    """Hash `first` and then the tensors' names, types, shapes and values, by name, with SHA-256."""
    found = hashlib.sha256(first)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
