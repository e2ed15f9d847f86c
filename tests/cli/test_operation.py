"""Progress of an operation that a command follows, in percent."""

from __future__ import annotations

from typing import Any

import pytest

from mstarctl.client import AdminClient
from mstarctl.start import operation
from mstarctl.start.operation import follow, percent_of


class Heads(AdminClient):
    """An admin socket that answers the heads of a wake one after the other."""

    name = "omni"

    def __init__(self, heads: list[dict[str, Any]]) -> None:
        self._heads = heads

    def head(self) -> dict[str, Any]:
        return self._heads.pop(0)


def test_a_wake_prints_its_percentage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "POLL_S", 0.0)

    def head(done: int, total: int, state: str = "running") -> dict[str, Any]:
        latest = {"number": 1, "state": state, "kind": "wake", "steps": [], "total": 0}
        phase = "wake" if total else ""
        return {"operation": latest, "state": "sleeping", "phase": phase, "done": done, "total": total}

    lines: list[str] = []
    last = head(0, 0, "done")
    heads = [head(0, 0), head(0, 80), head(4, 80), head(20, 80), head(21, 80), head(80, 80), last]
    assert follow(Heads(heads), {"number": 1, "kind": "wake"}, lines.append) is last
    assert lines == ["  wake 0 %", "  wake 25 %", "  wake 100 %"]
    assert percent_of({"phase": "", "done": 1, "total": 2}) is None
