"""Stored cases of the mixers beside KVM: `mixers_index.json` of ../shared/conformance, where it exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

FOLDER = Path(__file__).parents[2] / ".." / "shared" / "conformance"


def cases(kind: str) -> dict[str, dict[str, Any]]:
    """The index's cases of one kind, by name."""
    index = FOLDER / "mixers_index.json"
    if not index.exists():
        return {}
    return {
        name: case for name, case in json.loads(index.read_text())["cases"].items() if case["kind"] == kind
    }


def tensors(case: Mapping[str, Any]) -> dict[str, Tensor]:
    return load_file(FOLDER / case["file"])


def load_parameters(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Every `param.<name>` into the parameter of that name, reshaped; none may be missing on either side."""
    ours = dict(module.named_parameters())
    theirs = {name.removeprefix("param."): x for name, x in stored.items() if name.startswith("param.")}
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name].reshape(parameter.shape))


def assert_near(name: str, found: Tensor, expected: Tensor) -> None:
    """The index's tolerance for outputs and states."""
    found = found.detach().reshape(expected.shape)
    error = (found - expected).abs()
    scale = float(expected.abs().max())
    worst = float((error - 1e-4 * expected.abs()).max())
    assert worst <= 1e-5 * scale, f"{name}: {float(error.max())} of {scale}"


def assert_gradients(
    case: Mapping[str, Any], stored: Mapping[str, Tensor], given: Mapping[str, Tensor]
) -> None:
    """Compare `grad.<name>` for all names of `given` (leaves with a gradient), by the index's tolerance."""
    wanted = {name: x for name, x in stored.items() if name.startswith("grad.")}
    largest = max(float(x.abs().max()) for x in wanted.values())
    unknown = wanted.keys() - {f"grad.{name}" for name in given}
    assert not unknown, unknown
    for name, expected in wanted.items():
        leaf = given[name.removeprefix("grad.")]
        found = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).reshape(expected.shape)
        scale = float(expected.abs().max())
        limit = 1e-6 * largest if name in case.get("near_zero_grads", ()) else 1e-4 * scale
        error = float((found - expected).abs().max())
        assert error <= limit, f"{name}: {error} of {scale}"


def leaves(stored: Mapping[str, Tensor], module: nn.Module | None, names: list[str]) -> dict[str, Tensor]:
    """Fresh leaves of the inputs `names` that the case has, and the module's parameters as `param.<name>`."""
    found = {name: stored[name].clone().requires_grad_() for name in names if name in stored}
    if module is not None:
        found |= {f"param.{name}": parameter for name, parameter in module.named_parameters()}
    return found


def parametrize(kind: str) -> Callable:
    import pytest

    found = cases(kind)
    marks = () if found else pytest.mark.skip(reason="no ../shared/conformance/mixers_index.json")
    given = [pytest.param(case, id=name) for name, case in found.items()]
    return pytest.mark.parametrize("case", given or [pytest.param(None, id="none", marks=marks)])
