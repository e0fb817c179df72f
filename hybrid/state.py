"""What a model remembers between two calls: a value that can be copied, moved, counted, saved and loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .layers.base import MixerState
from .layers.registry import kinds

FORMAT = "hybrid-state-1"


class StateError(ValueError):
    """A state that does not fit the model or the call, or a file that holds none; the message says which."""


@dataclass
class BlockState(MixerState):
    """One block's part: the mixer's state, and the last token the feed-forward saw (for its token shift)."""

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
        return next((tensor.shape[0] for tensor in self._tensors().values()), 0)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def map(self, change: Callable[[Tensor], Tensor]) -> HybridState:
        return replace(self, layers=[layer.map(change) for layer in self.layers])

    def detach(self) -> HybridState:
        return self.map(lambda t: t.detach())

    def to(self, device: torch.device | str) -> HybridState:
        return self.map(lambda t: t.to(device))

    def fork(self) -> HybridState:
        """An independent copy; both can be continued."""
        return self.map(lambda t: t.clone())

    def refuse_other(self, layout: tuple[str, ...], batch: int) -> None:
        """StateError unless the state belongs to a model of this layout and a batch of this size."""
        if self.layout != layout:
            raise StateError("the state is another model's: " + _difference(self.layout, layout))
        for layer in self.layers:
            if layer.mixer is not None:
                layer.mixer._refuse_spent()
        if self.batch not in (0, batch):
            raise StateError(f"the state holds {self.batch} sequences, the call has {batch}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file; it appears whole or not at all."""
        from safetensors.torch import save

        target = Path(path)
        described = [_describe(layer) for layer in self.layers]
        metadata = {
            "format": FORMAT,
            "position": str(self.position),
            "layout": json.dumps(self.layout),
            "layers": json.dumps(described),
        }
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self._tensors().items()}
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with open(part, "wb") as file:
                file.write(save(tensors, metadata))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> HybridState:
        """Read what `save` wrote. Raises StateError when the file is none of ours, damaged, or holds a layer
        that is not installed."""
        metadata, tensors = _read(Path(path), device)
        try:
            described = json.loads(metadata["layers"])
            layers = [_build(one, f"layers.{i}", tensors, path) for i, one in enumerate(described)]
            return cls(layers, int(metadata["position"]), tuple(json.loads(metadata["layout"])))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise StateError(f"{path}: the state is damaged ({type(error).__name__}: {error})") from error

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            found.update({f"layers.{i}.{name}": tensor for name, tensor in layer.tensors().items()})
        return found


def _difference(found: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    if len(found) != len(wanted):
        return f"it has {len(found) - 1} layers, this model {len(wanted) - 1}"
    pairs = enumerate(zip(found, wanted, strict=True))
    index, (state, model) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    place = "its backbone" if index == 0 else f"its layer {index - 1}"
    return f"{place} is {state}, this model's is {model}"


def _describe(state: MixerState) -> dict[str, Any]:
    """Everything of a state but its tensors, as JSON values."""
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
    return {"class": type(state).__qualname__, "fields": fields}


def _build(described: dict[str, Any], name: str, tensors: dict[str, Tensor], path: Any) -> Any:
    """The inverse of `_describe`. Only classes of installed layers are ever built."""
    known = _state_classes()
    if described["class"] not in known:
        raise StateError(f"{path}: {name} is a '{described['class']}', of which no layer is installed")
    fields: dict[str, Any] = {}
    for key, value in described["fields"].items():
        if isinstance(value, dict):
            inner = f"{name}.{key}"
            value = tensors[inner] if "tensor" in value else _build(value, inner, tensors, path)
        fields[key] = value
    return known[described["class"]](**fields)


def _state_classes() -> dict[str, type[MixerState]]:
    kinds()  # imports every installed layer
    found: dict[str, type[MixerState]] = {}
    waiting = [MixerState]
    while waiting:
        cls = waiting.pop()
        found[cls.__qualname__] = cls
        waiting.extend(cls.__subclasses__())
    return found


def _read(path: Path, device: torch.device | str) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise StateError(f"{path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path}: cannot be read as a state ({error})") from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format")
        raise StateError(f"{path}: not a model state (format {found!r}, expected '{FORMAT}')")
    return metadata, tensors
