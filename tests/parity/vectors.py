"""Stored cases for parametrising tests, from tests/vectors and, where it exists, ../shared/conformance.

`hybrid.verify` reads, computes and compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid.verify import CaseResult, Setting, check
from hybrid.verify.compare import limits
from hybrid.verify.vectors import Case, read_cases

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "tests" / "vectors", ROOT.parent / "shared" / "conformance"]


def cases(*kinds: str) -> list[Case]:
    """Every case of these kinds in either folder, once; the second folder's are whole."""
    known = [case for folder in FOLDERS if folder.is_dir() for case in read_cases(folder)]
    return list({case.name: case for case in known if case.kind in kinds}.values())


def parametrize(*kinds: str) -> Callable:
    """A test runs once per case, as its argument `case`."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases(*kinds)])


def assert_holds(case: Case) -> None:
    result = check(case)
    assert result.status == "pass", result.reason


def assert_near(case: Case, stored: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Outputs, states and values on the way within the index's tolerance."""
    result = CaseResult(case.name)
    for name, ours in found.items():
        theirs = stored[name]
        result.compare("y", name, ours.reshape(theirs.shape), theirs, limits(case, stored, Setting()))
    assert result.status == "pass", result.reason


def assert_within(
    case: Case, stored: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float
) -> None:
    """All outputs, states and gradients within `tolerance` of each tensor's largest entry (gradients that
    should be zero: of a hundredth of the largest gradient of all)."""
    wanted = {name: x for name, x in stored.items() if name.split(".")[0] in ("y", "state", "grad")}
    assert found.keys() == wanted.keys()
    steepest = max(float(x.abs().max()) for name, x in wanted.items() if name.startswith("grad."))
    for name, want in wanted.items():
        near_zero = name in case.entry.get("near_zero_grads", ())
        scale = 0.01 * steepest if near_zero else float(want.abs().max())
        error = float((found[name].detach() - want).abs().max())
        assert error <= tolerance * scale, f"{name}: {error} of {scale}"


def in_dtype(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in case.tensors().items()}
