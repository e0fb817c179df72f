"""The DeepSpeed engine with what training needs around it: norms, clipping and skipped steps.

Only this file and `checkpoint/zero_state.py` know DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.checkpoint.tensor_files import Reader
from hybrid.checkpoint.zero_state import ZeroState
from hybrid.distributed.world import World
from hybrid.errors import TrainError
from hybrid.estimate.memory import LARGEST_BUCKET
from hybrid.recipe import Geometry
from hybrid.recipe.schema import Recipe

from . import optimizer


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    norm: float
    """Norm of the whole gradient before clipping; inf or nan when the step was skipped."""
    clip_factor: float
    """What the gradient was multiplied with; 0 when skipped."""
    skipped: bool


class Engine:
    """A model under DeepSpeed. Every method is called by all ranks."""

    def __init__(self, model: Any, recipe: Recipe, geometry: Geometry, world: World) -> None:
        """`model` is a HybridLM, or a module with `no_decay()` like its."""
        import deepspeed  # after `world.start` has set its accelerator

        self.stage, self._section = recipe.parallel.zero_stage, recipe.optimizer
        self._rho = optimizer.width_ratio(recipe.optimizer, recipe.model.hidden_size)
        self._passes = geometry.accumulation * recipe.train.tbptt_chunks
        self._taken = 0
        built = optimizer.build(recipe.optimizer, model.named_parameters(), model.no_decay())
        shapes = _shapes(model)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        config = settings(recipe, geometry, trained, world)
        self.deepspeed, *_ = deepspeed.initialize(
            model=model, optimizer=built, config=config, dist_init_required=False
        )
        self.zero_state = ZeroState(self.deepspeed, shapes, self.stage, world)
        if self.stage == 3:
            model.register_state_dict_post_hook(_refuse_partitioned)
        if recipe.train.compile:
            self.deepspeed.compile()

    @property
    def model(self) -> Any:
        """The module itself, for evaluation; under ZeRO-3 its parameters exist only inside a forward pass."""
        return self.deepspeed.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.deepspeed(*args, **kwargs)

    def backward(self, loss: Tensor, *, poisoned: bool = False) -> None:
        """Add the gradient of one pass.

        Args:
            loss: scalar, such that the step's gradient is that of the mean over ranks and passes.
            poisoned: a rank saw a non-finite loss: make the gradient non-finite too, so that all ranks skip.
        """
        self.deepspeed.backward(loss * math.nan if poisoned else loss)
        self._taken += 1
        if self._taken < self._passes:
            self.deepspeed.step()  # which only counts

    def step(self) -> Update:
        """Update the weights after the last pass; without a finite gradient the step is skipped."""
        assert self._taken == self._passes, f"{self._taken} passes of {self._passes}"
        self._taken = 0
        if self.stage == 0:
            norm = self._local_norm()
            self._clip_or_drop(norm)
            self.deepspeed.step()
        else:
            self.deepspeed.step()
            norm = float(self.deepspeed.get_global_grad_norm())
        skipped, clip = not math.isfinite(norm), self._section.clip
        factor = 0.0 if skipped else min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        return Update(norm, factor, skipped)

    def set_rates(self, fraction: float, resting: Collection[str] = ()) -> float:
        """Set the coming step's rates from the schedule's fraction of the peak, zero for `resting` groups;
        returns the base rate."""
        groups = self.deepspeed.optimizer.param_groups
        optimizer.apply(groups, self._section, self._rho, fraction, resting)
        return self._section.lr * fraction

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state from a tag's folder that was found whole, written by any number
        of processes at any ZeRO stage. TrainError when it is of another model."""
        self.zero_state.restore(Reader(folder))

    def close(self) -> None:
        """Take DeepSpeed's hooks off, so that another engine can be made in this process."""
        self.deepspeed.destroy()

    def _clip_or_drop(self, norm: float) -> None:
        """Do what DeepSpeed leaves out at stage 0, where it applies any gradient, nan too; without one the
        optimizer changes nothing."""
        if not math.isfinite(norm):
            self.deepspeed.zero_grad()
        elif self._section.clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self._section.clip, torch.tensor(norm))

    def _local_norm(self) -> float:
        """Compute the norm of the gradient that every rank holds whole (stage 0, after the reduction)."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else 0.0


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Map parameters and persistent buffers to shapes; what several names share stands under its first."""
    buffers = dict(model.named_buffers())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in model.state_dict(keep_vars=True):
        if name not in buffers:
            continue
        if not buffers[name].is_floating_point():
            raise TrainError(
                f"the model's buffer {name} is {buffers[name].dtype}: checkpoints hold floats only"
            )
        shapes[name] = tuple(buffers[name].shape)
    return shapes


def _refuse_partitioned(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Refuse a state dict under ZeRO-3, which would be saved as tensors without elements."""
    empty = [name for name, value in state.items() if isinstance(value, Tensor) and not value.numel()]
    if empty:
        raise TrainError(
            f"{empty[0]} and {len(empty) - 1} other parameters are spread over the processes (ZeRO stage 3) "
            "and have no values here: take the weights from the run's checkpoints"
        )


def settings(recipe: Recipe, geometry: Geometry, parameters: int, world: World) -> dict[str, Any]:
    """Write DeepSpeed's configuration; everything it would otherwise choose by itself is said."""
    bf16 = recipe.train.precision == "bf16"
    bucket = min(2 * -(-parameters // 2), LARGEST_BUCKET)  # DeepSpeed takes even sizes only
    zero: dict[str, Any] = {"stage": recipe.parallel.zero_stage, "reduce_bucket_size": bucket}
    if recipe.parallel.zero_stage > 0:
        zero |= {"allgather_bucket_size": bucket, "overlap_comm": world.device.type == "cuda"}
    if recipe.parallel.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": bucket}
    return {
        "train_micro_batch_size_per_gpu": geometry.micro_batch,
        "gradient_accumulation_steps": geometry.accumulation * recipe.train.tbptt_chunks,
        # Left out, it would be 1.0. At stage 0 the engine clips, which has to know the norm anyway.
        "gradient_clipping": recipe.optimizer.clip if recipe.parallel.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**60,
    }
