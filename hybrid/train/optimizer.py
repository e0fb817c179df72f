"""Parameter groups, and the learning rate and weight decay of each at every step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from hybrid.recipe.schema import OptimizerSection, ScheduleSection

ROLES = ("embedding", "matrices", "vectors", "head", "scalars")
"""Group names in order; `vectors` are decayed but not matrices, which only other packages' mixers have."""


def role(name: str, parameter: nn.Parameter, no_decay: set[str]) -> str:
    """Name the group of a model's parameter (Key-Value Means paper's code: labels of its optimiser)."""
    if name in no_decay:
        return "scalars"
    if name == "embedding.weight":
        return "embedding"
    if name == "head.weight":
        return "head"
    return "matrices" if parameter.ndim > 1 else "vectors"


def groups(named: Iterable[tuple[str, nn.Parameter]], no_decay: set[str]) -> list[dict[str, Any]]:
    """Make optimizer groups `{"role": ..., "params": [...]}`, without frozen parameters and empty groups."""
    members: dict[str, list[nn.Parameter]] = {name: [] for name in ROLES}
    for name, parameter in named:
        if parameter.requires_grad:
            members[role(name, parameter, no_decay)].append(parameter)
    return [{"role": name, "params": params} for name, params in members.items() if params]


def build(section: OptimizerSection, named: Iterable[tuple[str, nn.Parameter]], no_decay: set[str]) -> Any:
    """Build the torch optimizer: AdamW, or plain SGD without momentum. Rates are set before every step by
    `apply`, so it starts with none and a wrapper's trial step moves nothing."""
    members = groups(named, no_decay)
    if section.name == "sgd":
        return torch.optim.SGD(members, lr=0.0, weight_decay=0.0)
    betas = (section.betas[0], section.betas[1])
    return torch.optim.AdamW(members, lr=0.0, betas=betas, eps=section.eps, weight_decay=0.0, fused=True)


def rate_fraction(step: int, steps: int, schedule: ScheduleSection) -> float:
    """Compute learning rate / peak rate of 0-based `step` of `steps`; a pure function, so resuming is easy.

    Warm-up gives (step + 1) / warmup_steps. Every decay starts at the peak and would reach
    `final_fraction` at `steps`, one step after the last (the paper's schedule, upstream code).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    decay = steps - warmup
    if schedule.shape == "constant":
        decay = schedule.decay_steps or 0
    begin = steps - decay
    if step < begin:
        return 1.0
    done = min(1.0, (step - begin) / max(1, decay))
    if schedule.shape == "cosine":
        done = 0.5 - 0.5 * math.cos(math.pi * done)
    return 1.0 - (1.0 - schedule.final_fraction) * done


def width_ratio(section: OptimizerSection, hidden_size: int) -> float:
    """Compute muP's rho = hidden size / size the rate was tuned at; 1 when off."""
    return hidden_size / section.mup_base_size if section.mup_base_size else 1.0


def settings(section: OptimizerSection, rho: float, name: str, fraction: float) -> dict[str, float]:
    """Compute learning rate and weight decay of group `name` at `fraction` of the peak rate.

    Matrices take lr / rho and decay * rho; scalars are not decayed.
    """
    assert name in ROLES, name
    scale = rho if name == "matrices" else 1.0
    decay = 0.0 if name == "scalars" else section.weight_decay * scale
    return {
        "lr": section.lr / scale * fraction,
        "weight_decay": decay * fraction if section.decay_follows_schedule else decay,
    }


def apply(
    param_groups: list[dict[str, Any]],
    section: OptimizerSection,
    rho: float,
    fraction: float,
    resting: Collection[str] = (),
) -> None:
    """Set every group's rate and decay for the coming step; the `resting` ones stay as they are."""
    for group in param_groups:
        rate = 0.0 if group["role"] in resting else fraction
        group.update(settings(section, rho, group["role"], rate))
