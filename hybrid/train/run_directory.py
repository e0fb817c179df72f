"""The folder of a run; see `hybrid.runs` for the tree."""

from __future__ import annotations

import fcntl
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from hybrid import recipe as recipes
from hybrid.distributed.world import TrainError, World
from hybrid.files import write_json, write_text
from hybrid.recipe.schema import Recipe

PACKAGES = ("kvm-hybrid", "torch", "deepspeed", "numpy", "sentencepiece", "grain", "safetensors", "omegaconf")


class RunDirectory:
    """Main rank only: the one that writes here."""

    def __init__(self, folder: Path) -> None:
        """Create the folder and keep other runs out of it; TrainError when one is training there."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = open(folder / "lock", "w")  # noqa: SIM115 (held for the run's life)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            words = f"another process is training in {folder}: give this one another train.output"
            raise TrainError(words) from error

    def describe(self, recipe: Recipe, world: World) -> None:
        """Write the resolved recipe and the versions it runs with."""
        write_text(self.folder / "recipe.yaml", recipes.to_yaml(recipe))
        write_json(self.folder / "environment.json", environment(world))

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def environment(world: World) -> dict[str, Any]:
    """Versions and kind of machine, nothing that names this one."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.machine()
    return {
        "python": platform.python_version(),
        "system": sys.platform,
        "packages": {name: _version(name) for name in PACKAGES},
        "device": device,
        "processes": world.size,
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
