"""Clock and learning rate of a training stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.training.figures import last_figures
from scripts.training.pace import Pace


def test_a_stage_ends_after_its_time_or_its_steps(tmp_path: Path) -> None:
    now = iter([5.0, 5.0, 7.5, 12.5, 12.5])
    by_time = Pace(5.0, log=tmp_path / "codec.jsonl", clock=lambda: next(now))
    assert [by_time.advance() for _ in range(3)] == [0.0, 0.5, 1.0]
    by_time.note(loss=0.25)
    assert last_figures(tmp_path, ["codec"]) == {"codec": {"step": 3, "seconds": 7.5, "loss": 0.25}}
    by_steps = Pace(5.0, steps=2, clock=lambda: 0.0)
    assert [by_steps.advance() for _ in range(3)] == [0.0, 0.5, 1.0]


def test_the_rate_warms_up_and_falls() -> None:
    pace = Pace(1.0)
    pace.step = 25
    assert pace.factor(0.1, 50, 0.4) == 0.5
    pace.step = 50
    assert pace.factor(0.4, 50, 0.4) == 1.0
    assert pace.factor(0.7, 50, 0.4) == pytest.approx(0.51)
    assert pace.factor(1.0, 50, 0.4) == pytest.approx(0.02)
    assert pace.factor(0.5, 50, 0.0) == pytest.approx(0.51)
