"""Learning-rate schedules: pure functions of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from hybrid.recipe.schema import ScheduleSection


def rate_fraction(step: int, steps: int, schedule: ScheduleSection) -> float:
    """Learning rate of 0-based `step` of `steps` / peak rate.

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
