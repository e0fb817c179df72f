"""Parameter groups, and what the schedule does to them at every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hybrid.recipe.schema import OptimizerSection

ROLES = ("embedding", "matrices", "vectors", "head", "scalars")
"""Group names in order; `vectors` are decayed but not matrices, which only other packages' mixers have."""


def role(name: str, parameter: nn.Parameter, no_decay: set[str]) -> str:
    """The group of a model's parameter (Key-Value Means paper's code: labels of its optimiser)."""
    if name in no_decay:
        return "scalars"
    if name == "embedding.weight":
        return "embedding"
    if name == "head.weight":
        return "head"
    return "matrices" if parameter.ndim > 1 else "vectors"


def groups(named: Iterable[tuple[str, nn.Parameter]], no_decay: set[str]) -> list[dict[str, Any]]:
    """Optimizer groups `{"role": ..., "params": [...]}` without the empty ones."""
    members: dict[str, list[nn.Parameter]] = {name: [] for name in ROLES}
    for name, parameter in named:
        members[role(name, parameter, no_decay)].append(parameter)
    return [{"role": name, "params": params} for name, params in members.items() if params]


def width_ratio(section: OptimizerSection, hidden_size: int) -> float:
    """muP's rho = hidden size / size the rate was tuned at; 1 when off."""
    return hidden_size / section.mup_base_size if section.mup_base_size else 1.0


def settings(section: OptimizerSection, rho: float, name: str, fraction: float) -> dict[str, float]:
    """Learning rate and weight decay of group `name` when the schedule stands at `fraction` of the peak.

    Matrices take lr / rho and decay * rho; scalars are not decayed.
    """
    if name not in ROLES:
        raise ValueError(f"unknown optimizer group '{name}': one of {', '.join(ROLES)}")
    scale = rho if name == "matrices" else 1.0
    decay = 0.0 if name == "scalars" else section.weight_decay * scale
    return {
        "lr": section.lr / scale * fraction,
        "weight_decay": decay * fraction if section.decay_follows_schedule else decay,
    }


def build(section: OptimizerSection, named: Iterable[tuple[str, nn.Parameter]], no_decay: set[str]) -> Any:
    """The torch optimizer: AdamW, or plain SGD without momentum. Rates are set before every step by `apply`,
    so it starts with none and a wrapper's trial step moves nothing."""
    members = groups(named, no_decay)
    if section.name == "sgd":
        return torch.optim.SGD(members, lr=0.0, weight_decay=0.0)
    betas = (section.betas[0], section.betas[1])
    return torch.optim.AdamW(members, lr=0.0, betas=betas, eps=section.eps, weight_decay=0.0, fused=True)


def apply(param_groups: list[dict[str, Any]], section: OptimizerSection, rho: float, fraction: float) -> None:
    """Set every group's rate and decay for the coming step."""
    for group in param_groups:
        group.update(settings(section, rho, group["role"], fraction))
