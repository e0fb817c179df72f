"""What the results of `benchmarks.gpu` say should be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybrid.text import columns, duration

Found = Mapping[str, Any]
Advice = tuple[str, str, str]
"""What was looked at, what was found, what to change."""
LAUNCH = 5e-6
"""Seconds that a launch takes the host, about."""


def advice_table(found: Found) -> str:
    """Write what to change, or that there is nothing."""
    rows = [row for rule in RULES for row in rule(found)]
    if not rows:
        return "Nothing that was measured asks for a change."
    return "What to change\n" + columns([["what", "found", "change"], *rows], left={0, 1, 2})


def _broken(found: Found) -> Iterator[Advice]:
    for section, results in found.items():
        if "error" in results:
            yield section, results["error"][:60], "see its traceback; it measured nothing"
        for label in results.get("failed", ()):
            yield section, f"{label} is wrong", "fix before anything is timed"


def _walks(found: Found) -> Iterator[Advice]:
    """The walk that is fastest, and what keeps the operator from being faster than full attention."""
    for place, results in found.get("operator", {}).items():
        if not isinstance(results, dict) or "full" not in results:
            continue
        for budget in ("fixed", "sqrt"):
            own = {name: one for name, one in results.items() if name.startswith(budget)}
            best = min(own, key=lambda name: own[name]["both"])
            default = list(own)[-1]
            if own[best]["both"] < 0.9 * own[default]["both"]:
                times = f"{duration(own[best]['both'])} against {duration(own[default]['both'])} ({default})"
                yield f"operator, {place}", f"{best}: {times}", "make it the default there"
            launches = own[best]["launches"]
            if launches and launches * LAUNCH > 0.5 * own[best]["both"]:
                yield f"operator, {place}", f"{launches} launches of {best}", "launch-bound: fuse, or capture"
            if own[best]["ratio"] < 1:
                yield f"operator, {place}", f"{own[best]['ratio']:.2f}x of flash attention", "see its steps"


def _kernels(found: Found) -> Iterator[Advice]:
    times = {name: t for name, t in found.get("variants", {}).items() if isinstance(t, float)}
    for budget in {name.partition(", kernel")[0] for name in times if ", kernel" in name}:
        start = f"{budget}, kernel "
        own = {name.removeprefix(start): t for name, t in times.items() if name.startswith(start)}
        best = min(own, key=lambda name: own[name])
        if "cuda" in own and own[best] < 0.95 * own["cuda"]:
            gain = f"{duration(own[best])} against {duration(own['cuda'])}"
            yield f"kernels, {budget}", f"{best}: {gain}", "let softmax.kernels.choose take it"


def _training(found: Found) -> Iterator[Advice]:
    for label, one in found.get("train", {}).items():
        if isinstance(one, dict) and one.get("utilisation") and one["utilisation"] < 0.3:
            parts = [part for part in one.get("parts", ()) if part["part"] != "step"]
            slowest = max(parts, key=lambda part: part["seconds"])["part"] if parts else "?"
            yield label, f"{one['utilisation']:.0%} of peak", f"look at its slowest part, {slowest}"
    rates = {name: one["tokens_per_second"] for name, one in found.get("zero", {}).items() if "stage" in name}
    if rates and min(rates.values()) < 0.7 * max(rates.values()):
        slowest = min(rates, key=lambda name: rates[name])
        yield "zero", f"{slowest}: {rates[slowest]:,.0f} tokens/s", "see what its hooks wait for"


RULES: tuple[Callable[[Found], Iterator[Advice]], ...] = (_broken, _walks, _kernels, _training)
