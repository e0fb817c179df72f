"""Comparing computed tensors with stored ones: where to compute, how much they may differ, what came out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .vectors import Case, Tensors, VerifyError

_GROUPS = {
    "y": "y", "logits": "logits", "decode_logits": "decode", "loss": "loss", "layer": "init",
    "state": "state", "route": "route", "updates": "route", "grad": "grad",
}  # fmt: skip
"""How a result's stored name begins (but for a number) -> its group."""
GROUPS = tuple(dict.fromkeys(_GROUPS.values()))
"""What results are summed up by, in the table's order."""

EXACT = {"log_w", "g", "init_state", "init.state", "init.recurrent"}
"""Inputs that stay fp32 in a bf16 model: log decays and recurrent states."""


def group_of(name: str) -> str | None:
    """Find the group of a stored result; None for inputs, and for values on the way but choices of slots."""
    return "route" if name == "mid.assignments" else _GROUPS.get(re.split(r"\d*[./]", name)[0])


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

    def given(self, stored: Tensors) -> dict[str, Tensor]:
        """Copy stored tensors to compute with: in bf16 what such a model holds in bf16."""

        def copy(name: str, x: Tensor) -> Tensor:
            rounded = self.rounded and x.is_floating_point() and name not in EXACT
            return x.to(self.device, torch.bfloat16 if rounded else x.dtype, copy=True)

        return {name: copy(name, x) for name, x in stored.items()}


Limits = Callable[[str, str, Tensor], tuple[float, float]]
"""Group, name and stored tensor -> the absolute error allowed, and that in parts of each stored entry."""

FIXED = {
    "core": {"y": 1e-5, "state": 1e-5, "grad": 5e-5},
    "model": {"logits": 1e-5, "decode": 1e-5, "loss": 1e-5, "grad": 1e-6},
}
"""Level of a case in `index.json` -> the absolute error allowed in each group."""
FIXED_BF16 = {
    "core": {"y": 2e-2, "state": 2e-2, "grad": 1e-1},
    "model": {"logits": 5e-2, "decode": 5e-2, "loss": 1e-2, "grad": 5e-3},
}
"""The same in bf16, in units of the tensor's largest entry where that is above 1."""

BF16_TO_FP32 = 2**16
"""Ratio of the two roundings."""


def limits(case: Case, stored: Tensors, setting: Setting) -> Limits:
    """Choose the tolerances of a case: fixed ones in `index.json`, those that `mixers_index.json` suggests.

    The latter, in words there. Outputs and states: 1e-4 of each entry and 1e-5 of the tensor's largest.
    Gradients: 1e-4 of the tensor's largest entry; those of `near_zero_grads`, which are rounding only, 1e-6
    of the case's largest gradient. In bf16 5e-2 of the largest output; gradients 3e-2 of the case's largest
    and 1e-1 of the tensor's largest, more where the index tells that fp32 deviates much: the case then
    amplifies rounding, of bf16 as of fp32.
    """
    if case.level:
        table = (FIXED_BF16 if setting.rounded else FIXED)[case.level]
        return lambda group, name, x: (table[group] * (max(1.0, _largest(x)) if setting.rounded else 1), 0.0)
    zero = set(case.entry.get("near_zero_grads", ()))
    part = max(1e-1, 2 * BF16_TO_FP32 * case.entry.get("fp32_deviation", {}).get("grads", 0.0))
    steepest = max((_largest(x) for name, x in stored.items() if name.startswith("grad.")), default=0.0)

    def scaled(group: str, name: str, x: Tensor) -> tuple[float, float]:
        if group != "grad":
            return (5e-2 * _largest(x), 0.0) if setting.rounded else (1e-5 * _largest(x), 1e-4)
        if setting.rounded:
            return part * _largest(x) + 3e-2 * steepest, 0.0
        return (1e-6 * steepest if name in zero else 1e-4 * _largest(x)), 0.0

    return scaled


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

    def compare_all(self, stored: Tensors, found: Mapping[str, Tensor], allowed: Limits) -> None:
        """Compare every stored result with the one computed, by name; axes of size 1 do not matter."""
        for name, theirs in stored.items():
            group = group_of(name)
            if group is not None and name not in found:
                self.fail(f"{name} is stored, but is none of our results")
            elif group is not None:
                ours = found[name]
                same = ours.squeeze().shape == theirs.squeeze().shape
                self.compare(group, name, ours.reshape(theirs.shape) if same else ours, theirs, allowed)
        for name in sorted(found.keys() - stored.keys()):
            if name.startswith("state."):
                self.fail(f"the case has no {name}, our state has")

    def compare(self, group: str, name: str, ours: Tensor, theirs: Tensor, allowed: Limits) -> None:
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
        """Mark the case as failed; the first reason is kept, as later ones mostly follow from it."""
        self.reason = self.reason or reason
        self.status = "fail"
