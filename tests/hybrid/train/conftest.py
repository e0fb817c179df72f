"""The table of misfortunes at the end of `make chaos`."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of every kind of misfortune that tests recorded: trials, passed ones, the longest; what happened."""
    trials: dict[str, list[pytest.TestReport]] = {}
    happened: Counter[str] = Counter()
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            recorded = dict(report.user_properties)
            if "misfortune" in recorded:
                trials.setdefault(recorded["misfortune"], []).append(report)
                happened.update(recorded["happened"])
    if not trials:
        return
    write = terminalreporter.write_line
    terminalreporter.section("misfortunes")
    write(f"{'kind':24}{'trials':>8}{'passed':>8}{'longest':>11}")
    every = [report for reports in trials.values() for report in reports]
    for kind, reports in [*sorted(trials.items()), ("all", every)]:
        passed = sum(report.passed for report in reports)
        write(f"{kind:24}{len(reports):8}{passed:8}{max(report.duration for report in reports):9.1f} s")
    write("what happened: " + ", ".join(f"{what} {count}" for what, count in sorted(happened.items())))
    write(f"time of the trials: {sum(report.duration for report in every):.0f} s")
