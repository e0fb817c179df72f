from __future__ import annotations

import pytest

from hybrid.recipe.schema import ScheduleSection
from hybrid.train.optimizer import rate_fraction


def fractions(steps: int, **section) -> list[float]:
    return [rate_fraction(step, steps, ScheduleSection(**section)) for step in range(steps)]


def test_linear_is_the_papers_triangle():
    """(it + 1) / warm-up, then linear, reaching 0 one step after the last."""
    assert fractions(6, shape="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rate_fraction(6, 6, ScheduleSection(warmup_steps=2)) == 0.0


def test_cosine_and_a_final_fraction():
    found = fractions(4, shape="cosine", final_fraction=0.2)
    assert found == pytest.approx(
        [1.0, 0.2 + 0.8 * (0.5 + 0.5 * 2**-0.5), 0.6, 0.2 + 0.8 * (0.5 - 0.5 * 2**-0.5)]
    )


def test_constant_decays_only_at_the_end():
    assert fractions(6, shape="constant", warmup_steps=1, decay_steps=2) == [1, 1, 1, 1, 1, 0.5]
    assert fractions(3, shape="constant") == [1, 1, 1]


def test_warm_up_does_not_depend_on_the_number_of_steps():
    """So a run may be made longer while it is still warming up."""
    assert fractions(50, warmup_steps=30)[:30] == fractions(90, warmup_steps=30)[:30]
