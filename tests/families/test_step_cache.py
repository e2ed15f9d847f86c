"""Steps of a flow loop that extrapolate their velocity: which they are, and with which factors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mstar_core.errors import ConfigError
from mstar_core.families.step_cache import HEAD, MOST_CACHED, computed_steps, default_share, step_groups

COUNTS = (0, 1, 2, 3, 4, 8, 12, 41, 49, 999)
SHARES = (0.1, 0.3, 0.5, 0.7, MOST_CACHED)


@pytest.mark.parametrize("count", COUNTS)
def test_a_share_of_zero_computes_every_step(count: int) -> None:
    assert computed_steps(count, 0.0) == list(range(count))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("share", SHARES)
def test_the_first_two_steps_and_the_last_are_computed_and_others_evenly(count: int, share: float) -> None:
    steps = computed_steps(count, share)
    assert steps == sorted(set(steps)) and set(steps) <= set(range(count))
    assert steps[:HEAD] == list(range(min(count, HEAD))) and steps[-1:] == list(range(count))[-1:]
    assert len(steps) == max(round(count * (1 - share)), min(count, HEAD + 1))
    gaps = [after - before for before, after in pairwise(steps[HEAD - 1 :])]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.parametrize("share", [0.0, *SHARES])
def test_groups_hold_every_step_once_and_follow_a_line(share: float) -> None:
    times = [1 / (1 + 0.1 * step) for step in range(40)]
    velocity = [3.0 - 7.0 * time for time in times]
    groups = step_groups(times, share)
    assert [step for group in groups for step in range(group.first, group.stop)] == list(range(len(times)))
    for before, group in pairwise(groups):
        change = velocity[group.first] - velocity[before.first]
        found = [velocity[group.first] + weight * change for weight in group.weights]
        assert found == pytest.approx(velocity[group.first : group.stop])
    assert not any(groups[0].weights)


def test_groups_of_a_step_extrapolate_nothing() -> None:
    assert all(group.weights == (0.0,) for group in step_groups([0.9, 0.5, 0.4], 0.0))
    assert step_groups([], 0.5) == []


@pytest.mark.parametrize("value", [0, 0.0, 0.5, MOST_CACHED])
def test_an_option_in_its_range_is_a_share(value: float) -> None:
    assert default_share(value) == value


@pytest.mark.parametrize("value", [-0.1, MOST_CACHED + 0.01, True, "0.5", None, float("nan")])
def test_another_option_names_the_range(value: Any) -> None:
    with pytest.raises(ConfigError, match="step_cache") as caught:
        default_share(value)
    assert str(MOST_CACHED) in str(caught.value.hint)
