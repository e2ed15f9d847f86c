"""The measurement of step caches, tried with few steps of few cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.step_cache import SHARES, Task, drawings, edits, measured, videos

TASKS: dict[str, Callable[[], Task]] = {
    "drawings": lambda: drawings(1),
    "edits": lambda: edits(1),
    "videos": lambda: videos(1, "unipc"),
}


@pytest.mark.parametrize("kind", TASKS)
def test_each_share_stands_beside_fewer_steps_of_its_cost(kind: str) -> None:
    task = replace(TASKS[kind](), steps=16, fine=20)
    whole, *lines = measured(task)
    assert (whole["steps"], whole["error"], whole["cases"]) == (16, 0.0, 1) and whole["error_fine"] > 0
    assert [line["setting"] for line in lines[::2]] == [f"step_cache {share}" for share in SHARES]
    for cached, fewer in zip(lines[::2], lines[1::2], strict=True):
        assert cached["steps"] == fewer["steps"] < whole["steps"] and cached["error"] > 0
        assert cached["passes"] < whole["passes"]
