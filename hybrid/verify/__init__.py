"""`hybrid verify`: compare this machine's results with stored test vectors."""

from __future__ import annotations

import os
from collections.abc import Callable

from hybrid.convert import NotSupported

from .compare import GROUPS, CaseResult, Setting
from .kvm import check_core
from .mixers import (
    check_initial,
    check_layer,
    check_operator,
    initial_kinds,
    layer_kinds,
    operator_kinds,
)
from .models import check_mixer_model, check_model
from .vectors import Case, CaseError, VerifyError, read_cases

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

Check = Callable[[Case, CaseResult], None]

LEVELS: dict[str, Check] = {"core": check_core, "model": check_model}
"""Level of a case in `index.json` -> what checks it."""

KINDS: dict[str, Check] = {
    **dict.fromkeys(layer_kinds(), check_layer),
    **dict.fromkeys(operator_kinds(), check_operator),
    **dict.fromkeys(initial_kinds(), check_initial),
    "model": check_mixer_model,
}
"""Kind of a case in `mixers_index.json` -> what checks it."""


def verify(folder: str | os.PathLike[str], setting: Setting = Setting()) -> int:
    """Check every case of `folder` and print a table; 0 when some passed and none failed, else 1."""
    results = check_folder(folder, setting)
    print(table(results))
    statuses = [result.status for result in results]
    return 0 if "pass" in statuses and "fail" not in statuses else 1


def check_folder(folder: str | os.PathLike[str], setting: Setting = Setting()) -> list[CaseResult]:
    """One result per case of the folder's index files. VerifyError without one that is readable."""
    return [check(case, setting) for case in read_cases(folder)]


def check(case: Case, setting: Setting = Setting()) -> CaseResult:
    """Compute one case and compare."""
    result = CaseResult(case.name, setting=setting)
    found = LEVELS.get(case.level) if case.level else KINDS.get(str(case.kind))
    if found is None:
        result.status = "not covered"
        result.reason = f"level {case.level!r}" if case.level else f"no check for cases of kind {case.kind!r}"
        return result
    try:
        found(case, result)
    except NotSupported as error:
        result.status, result.reason = "not covered", str(error)
    except ValueError as error:  # of this package, the converter or a layer: all in words
        result.fail(str(error).replace("\n", " "))
    except KeyError as error:
        result.fail(f"the case has no {error}")
    except Exception as error:  # one broken layer must not hide what the other cases show
        result.fail(f"{type(error).__name__}: {error}".splitlines()[0])
    return result


def table(results: list[CaseResult]) -> str:
    """A line per case with the largest error of each group of tensors, and the counts."""
    groups = [group for group in GROUPS if any(group in result.errors for result in results)]
    width = max([4, *(len(result.name) for result in results)])
    lines = [f"{'case':{width}}  result       " + "".join(f"{group:>9}" for group in groups)]
    for result in results:
        line = f"{result.name:{width}}  {result.status:11}  "
        line += "".join(f"{_shown(result.errors.get(group)):>9}" for group in groups)
        lines.append(f"{line}  {result.reason}".rstrip())
    counts = {status: sum(r.status == status for r in results) for status in ("pass", "fail", "not covered")}
    lines.append("")
    lines.append(f"{counts['pass']} passed, {counts['fail']} failed, {counts['not covered']} not covered")
    if not counts["pass"]:
        lines.append("nothing was verified")
    return "\n".join(lines)


def _shown(error: float | None) -> str:
    if error is None:
        return "-"
    return "0" if error == 0 else f"{error:.1e}"
