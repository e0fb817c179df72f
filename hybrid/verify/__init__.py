"""`hybrid verify`: compare this machine's results with stored test vectors."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import Tensor

from hybrid.errors import NotSupported, UserError
from hybrid.text import columns

from .compare import GROUPS, CaseResult, Setting, group_of, limits
from .kvm import run_kvm
from .mixers import LAYERS, OPERATORS, run_initial, run_layer, run_operator
from .models import run_model
from .vectors import Case, CaseError, Tensors, VerifyError, read_cases

__all__ = [
    "Case",
    "CaseError",
    "CaseResult",
    "Setting",
    "VerifyError",
    "check",
    "check_folder",
    "table",
    "verify",
]

RUN: dict[str, Callable[[Case, Tensors], dict[str, Tensor]]] = {
    "core": run_kvm,
    "model": run_model,
    **dict.fromkeys(LAYERS, run_layer),
    **dict.fromkeys(OPERATORS, run_operator),
    **dict.fromkeys((f"{kind}_init" for kind in LAYERS), run_initial),
}
"""Level of a case in `index.json`, kind in `mixers_index.json` -> what computes results by stored name."""


def verify(folder: str | os.PathLike[str], setting: Setting = Setting()) -> int:
    """Check every case of `folder` and print a table; 0 when some passed and none failed, else 1."""
    results = check_folder(folder, setting)
    print(table(results))
    statuses = [result.status for result in results]
    return 0 if "pass" in statuses and "fail" not in statuses else 1


def check_folder(folder: str | os.PathLike[str], setting: Setting = Setting()) -> list[CaseResult]:
    """Check every case of the folder's index files. Raises VerifyError without one that is readable."""
    return [check(case, setting) for case in read_cases(folder)]


def check(case: Case, setting: Setting = Setting()) -> CaseResult:
    """Compute one case and compare."""
    result = CaseResult(case.name)
    run = RUN.get(case.level or str(case.kind))
    if run is None:
        result.status = "not covered"
        result.reason = f"level {case.level!r}" if case.level else f"no check for cases of kind {case.kind!r}"
        return result
    try:
        stored = case.tensors()
        found = run(case, setting.given(stored))
        if case.kind == "model":  # decoding must give the logits of one pass
            stored["decode_logits"] = stored["logits"]
        if setting.rounded:  # rounded keys may choose other routes, so stored ones were replayed
            stored = {name: x for name, x in stored.items() if group_of(name) != "route"}
        result.compare_all(stored, found, limits(case, stored, setting))
    except NotSupported as error:
        result.status, result.reason = "not covered", str(error)
    except UserError as error:
        result.fail(str(error).replace("\n", " "))
    except KeyError as error:
        result.fail(f"the case has no {error}")
    except Exception as error:  # one broken layer must not hide what the other cases show
        result.fail(f"{type(error).__name__}: {error}".splitlines()[0])
    return result


def table(results: list[CaseResult]) -> str:
    """Write a line per case with the largest error of each group of tensors, and the counts."""
    groups = [group for group in GROUPS if any(group in result.errors for result in results)]
    rows = [["case", "result", *groups, ""]]
    for result in results:
        errors = [_shown(result.errors.get(group)) for group in groups]
        rows.append([result.name, result.status, *errors, result.reason])
    counts = {status: sum(r.status == status for r in results) for status in ("pass", "fail", "not covered")}
    lines = [columns(rows, left={0, 1, len(rows[0]) - 1}), ""]
    lines.append(f"{counts['pass']} passed, {counts['fail']} failed, {counts['not covered']} not covered")
    if not counts["pass"]:
        lines.append("nothing was verified")
    return "\n".join(lines)


def _shown(error: float | None) -> str:
    if error is None:
        return "-"
    return "0" if error == 0 else f"{error:.1e}"
