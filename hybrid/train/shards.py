"""How DeepSpeed's files are written and read: synced to disk, errors kept, unpickling only what we name.

Imports deepspeed; imported by the engine only.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

KNOWN_CLASSES = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
"""What a ZeRO checkpoint holds beside tensors and plain values."""


class ShardFiles(TorchCheckpointEngine):
    """DeepSpeed's file layer.

    A failing write must not raise inside `save_checkpoint`, where the other ranks wait at a barrier: the
    first error is kept in `error` for the ranks to talk about afterwards.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.error: OSError | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._keep(lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        self._keep(lambda: self._write(state_dict, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(KNOWN_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True)

    @staticmethod
    def _write(state_dict: Any, path: str) -> None:
        try:
            with open(path, "wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
        except RuntimeError as error:  # torch's zip writer, on a full disk
            raise OSError(f"could not write {path}: {error}") from error

    def _keep(self, work: Any) -> None:
        if self.error is None:
            try:
                work()
            except OSError as error:
                self.error = error
