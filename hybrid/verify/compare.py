"""Comparing our tensors with stored ones: where to compute, how much they may differ, what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .vectors import Case, Tensors, VerifyError

BF16_TO_FP32 = 2**16
"""Ratio of the two roundings."""

GROUPS = ("y", "logits", "decode", "loss", "init", "state", "route", "grad")
"""What results are summed up by, in the table's order."""


@dataclass(frozen=True)
class Setting:
    """Where and how precisely to compute."""

    device: str = "cpu"
    precision: str = "fp32"
    """fp32 (as stored) or bf16."""

    def __post_init__(self) -> None:
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
            reason = str(error).splitlines()[0]
            raise VerifyError(f"device '{self.device}' cannot be used here: {reason}") from error

    @property
    def rounded(self) -> bool:
        return self.precision == "bf16"

    def given(self, stored: Tensor) -> Tensor:
        """A copy of a stored tensor to compute with."""
        dtype = torch.bfloat16 if self.rounded and stored.is_floating_point() else stored.dtype
        return stored.to(self.device, dtype, copy=True)


Allowed = Callable[[str, str, Tensor], tuple[float, float]]
"""Group, name and stored tensor -> the absolute error allowed, and that in parts of each stored entry."""


def fixed_limits(limits: Mapping[str, float], rounded: Mapping[str, float], setting: Setting) -> Allowed:
    """One absolute limit for each group; in bf16 in units of the largest entry where that is above 1."""

    def allowed(group: str, name: str, stored: Tensor) -> tuple[float, float]:
        if not setting.rounded:
            return limits[group], 0.0
        return rounded[group] * max(1.0, _largest(stored)), 0.0

    return allowed


def scaled_limits(case: Case, tensors: Tensors, setting: Setting) -> Allowed:
    """The tolerances that `mixers_index.json` suggests (in words).

    Outputs and states: 1e-4 of each entry and 1e-5 of the tensor's largest. Gradients: 1e-4 of the tensor's
    largest entry; those of `near_zero_grads`, which are rounding only, 1e-6 of the case's largest gradient.
    In bf16 5e-2 of the largest output; gradients 3e-2 of the case's largest and 1e-1 of the tensor's largest,
    more where the index tells that fp32 deviates much: the case then amplifies rounding, of bf16 as of fp32.
    """
    zero = set(case.entry.get("near_zero_grads", ()))
    part = max(1e-1, 2 * BF16_TO_FP32 * case.entry.get("fp32_deviation", {}).get("grads", 0.0))
    steepest = max((_largest(x) for name, x in tensors.items() if name.startswith("grad.")), default=0.0)

    def allowed(group: str, name: str, stored: Tensor) -> tuple[float, float]:
        largest = _largest(stored)
        if group != "grad":
            return (5e-2 * largest, 0.0) if setting.rounded else (1e-5 * largest, 1e-4)
        if setting.rounded:
            return part * largest + 3e-2 * steepest, 0.0
        return (1e-6 * steepest if name in zero else 1e-4 * largest), 0.0

    return allowed


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@dataclass
class CaseResult:
    """What became of one case."""

    name: str
    status: str = "pass"
    """pass, fail or not covered."""
    errors: dict[str, float] = field(default_factory=dict)
    """Group -> largest absolute difference; for routes the number of wrong entries."""
    reason: str = ""
    """Why it failed or is not covered."""
    setting: Setting = Setting()

    def compare(self, group: str, name: str, ours: Tensor, theirs: Tensor, allowed: Allowed) -> None:
        """Take in one tensor; routes must be equal."""
        if ours.shape != theirs.shape:
            self.fail(f"{name} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}")
            return
        ours = ours.detach().to(theirs.device)
        if group == "route":
            wrong = float((ours != theirs).sum())
            self._note(group, name, wrong, wrong, 0.0)
        elif ours.numel():
            expected = theirs.double().flatten()
            error = (ours.double().flatten() - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            absolute, relative = allowed(group, name, theirs)
            limit = (absolute + relative * expected.abs()).nan_to_num(nan=0.0, posinf=0.0)
            worst = int((error - limit).argmax())
            self._note(group, name, float(error.max()), float(error[worst]), float(limit[worst]))

    def _note(self, group: str, name: str, largest: float, error: float, limit: float) -> None:
        self.errors[group] = max(largest, self.errors.get(group, 0.0))
        if error > limit:
            self.fail(f"{name} is off by {error:.3g} (allowed {limit:g})")

    def fail(self, reason: str) -> None:
        """The first reason is kept: later ones mostly follow from it."""
        self.reason = self.reason or reason
        self.status = "fail"


def gradient(tensor: Tensor) -> Tensor:
    """The gradient of a leaf, zeros where nothing reached it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
