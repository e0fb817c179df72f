"""The fp32 master weights and optimizer state of a DeepSpeed engine, in every ZeRO stage: taken out as the
tensors of `tensor_files`, and put back.

Stage 0 keeps whole parameters and states on every rank. Stages 1 and 2 flatten every optimizer group and give
each rank a slice of the flat tensor, stage 3 slices each parameter. Frozen parameters have neither masters
nor state: they are kept as they are computed with. Known from deepspeed 0.19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.distributed.world import World
from hybrid.errors import TrainError

from .tensor_files import STEP, Entry, Reader, TensorFile, layout

ELEMENTS_AT_ONCE = 2**24
"""Elements (64 MiB) that travel between ranks at once."""


@dataclass(frozen=True)
class Fragment:
    """What this rank updates of one flattened parameter."""

    start: int
    count: int
    flat: Tensor
    """What the optimizer updates; the key of its state."""
    offset: int
    """Where the fragment begins in `flat` and in state tensors like it."""

    def view(self, tensor: Tensor) -> Tensor:
        """View the fragment of `flat`, or of a state tensor like it, as `[count]`."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.count)


class ZeroState:
    """The fp32 weights and optimizer state of a DeepSpeed engine. Every method is called by all ranks."""

    def __init__(self, engine: Any, shapes: dict[str, tuple[int, ...]], stage: int, world: World) -> None:
        """`shapes`: of the model's parameters and persistent buffers, by name, before ZeRO took them over."""
        self._wrapper = engine.optimizer
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        self._shapes, self._stage, self._world = shapes, stage, world
        self._parameters: dict[str, nn.Parameter] = dict(engine.module.named_parameters())
        self._buffers = {name: buffer for name, buffer in engine.module.named_buffers() if name in shapes}
        found = {name: self._fragment(parameter) for name, parameter in self._parameters.items()}
        self._fragments = {name: fragment for name, fragment in found.items() if fragment is not None}
        self._trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}

    def capture(self) -> list[tuple[TensorFile, list[Tensor]]]:
        """Copy to the CPU what stands in the files that this rank has to write.

        The ranks share the files, so that none needs more memory than for its own.
        """
        mine: list[tuple[TensorFile, list[Tensor]]] = []
        for number, file in enumerate(self.files()):
            writer, chunks = number % self._world.size, []
            for begin in range(0, file.elements, ELEMENTS_AT_ONCE):
                end = min(begin + ELEMENTS_AT_ONCE, file.elements)
                chunks.append(self._chunk(file, begin, end, writer))
            if writer == self._world.rank:
                mine.append((file, [chunk for chunk in chunks if chunk is not None]))
        return mine

    def files(self) -> list[TensorFile]:
        """Plan all files, of whatever rank. Without a state (nothing updated yet) there are weights only."""
        states = self._base.state.values()
        keys = {key for state in states for key, value in state.items() if isinstance(value, Tensor)}
        return layout(self._shapes, sorted(keys), self._trained)

    def restore(self, reader: Reader) -> None:
        """Put weights and state back, bit for bit."""
        if self._stage == 3:
            self._wrapper.checkpoint_event_prologue()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._set_weight(parameter, self._fragments.get(name), self._read(reader, name))
            for name, buffer in self._buffers.items():
                buffer.copy_(self._read(reader, name))
            for name in self._trained & self._fragments.keys():
                for key in reader.keys:
                    self._set_state(self._fragments[name], key, reader.state(name, key))
        if self._stage == 3:
            self._wrapper.checkpoint_event_epilogue()

    def _fragment(self, parameter: nn.Parameter) -> Fragment | None:
        rank = self._world.rank
        if self._stage == 3 and not parameter.requires_grad:
            own = parameter.ds_tensor  # type: ignore[attr-defined]
            count = min(own.numel(), parameter.ds_numel - rank * own.numel())  # type: ignore[attr-defined]
            return Fragment(rank * own.numel(), count, own, 0) if count > 0 else None
        if self._stage == 3:
            group, offset, size = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
            start = rank * size  # the last ranks' may be, or end in, padding
            count = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
            flat = self._wrapper.fp32_partitioned_groups_flat[group]
            return Fragment(start, count, flat, offset) if count > 0 else None
        if self._stage == 0 or not parameter.requires_grad:  # whole on every rank, of which one gives it
            return Fragment(0, parameter.numel(), parameter, 0) if self._stage == 0 or rank == 0 else None
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        flat = self._base.param_groups[mapping.param_group_index]["params"][0]
        low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Fragment(low.start, low.numel, flat, high.start)

    def _chunk(self, file: TensorFile, begin: int, end: int, writer: int) -> Tensor | None:
        """Collect elements `begin` to `end` of a file on the CPU of its writer; elsewhere None."""
        rank, alone = self._world.rank, self._stage == 0 or self._world.size == 1
        if alone and rank != writer:
            return None
        chunk = torch.zeros(end - begin, device=self._world.device)
        for entry in file.entries:
            if entry.offset >= end or entry.end <= begin:
                continue
            offset, own = self._own(entry, owns_buffers=alone or rank == 0)
            offset += entry.offset
            low, high = max(begin, offset), min(end, offset + own.numel())
            if low < high:
                chunk[low - begin : high - begin] = own[low - offset : high - offset]
        if not alone:
            # Every element comes from one rank. Added as integers to zeros, it keeps its bits: -0.0, nan too.
            dist.reduce(chunk.view(torch.int32), writer)
        return chunk.cpu() if rank == writer else None

    def _own(self, entry: Entry, *, owns_buffers: bool) -> tuple[int, Tensor]:
        """Find what this rank has of an entry: where it starts, and its elements in a row."""
        if entry.parameter in self._buffers:
            whole = self._buffers[entry.parameter].detach().reshape(-1)
            return 0, whole if owns_buffers else whole[:0]
        fragment = self._fragments.get(entry.parameter)
        nothing = torch.empty(0, device=self._world.device)
        if fragment is None:
            return 0, nothing
        if not entry.key:
            return fragment.start, fragment.view(fragment.flat)
        state = self._base.state.get(fragment.flat, {})
        if entry.key not in state:  # of a parameter that never had a gradient
            return 0, nothing
        if entry.key == STEP:
            return 0, state[STEP].detach().view(1) if fragment.start == 0 else nothing
        return fragment.start, fragment.view(state[entry.key])

    def _read(self, reader: Reader, name: str) -> Tensor:
        found = reader.weight(name)
        if tuple(found.shape) != self._shapes[name]:
            raise TrainError(
                f"{reader.folder}: {name} is {tuple(found.shape)} there and {self._shapes[name]} here"
            )
        return found

    def _set_weight(self, parameter: nn.Parameter, fragment: Fragment | None, whole: Tensor) -> None:
        """Set the master, and the parameter that is computed with (rounded to its own dtype)."""
        if self._stage != 3:
            parameter.data.copy_(whole)
        if fragment is None:
            return
        own = whole.reshape(-1).narrow(0, fragment.start, fragment.count)
        fragment.view(fragment.flat).copy_(own)
        if self._stage == 3:
            parameter.ds_tensor.data.view(-1)[: fragment.count].copy_(own)  # type: ignore[attr-defined]

    def _set_state(self, fragment: Fragment, key: str, whole: Tensor) -> None:
        state, flat = self._base.state[fragment.flat], fragment.flat.detach()
        if key == STEP:  # one for all parameters in a flat tensor, which are updated together
            state[STEP] = torch.maximum(
                state.get(STEP, torch.zeros((), device=flat.device)), whole.to(flat.device)
            )
            return
        if key not in state:
            state[key] = torch.zeros_like(flat)
        fragment.view(state[key]).copy_(whole.reshape(-1).narrow(0, fragment.start, fragment.count))
