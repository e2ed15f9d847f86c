"""A call to a deployment that is starting: what it says, and the wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar_core.errors import ExitCode, StartError, Unavailable, Unreachable
from mstar_core.host.run_dir import RunDirectory
from mstarctl.call import starting
from mstarctl.call.notice import warn_once
from mstarctl.call.starting import SPAWNING, check_started
from mstarctl.output import Printer


class Run(RunDirectory):
    """A run directory whose supervisor lives."""

    is_held = True

    def holder(self) -> int | None:
        return 1 if self.is_held else None


def snapshot(state: str, **phases: tuple[str, int, int]) -> dict[str, Any]:
    children = {
        name.replace("_", "-"): {
            "state": "ready" if phase == "ready" else "starting",
            "phase": phase,
            "done": done,
            "total": total,
            "detail": "",
        }
        for name, (phase, done, total) in phases.items()
    }
    ranks = {"rank/0": {"rank": 0, "nodes": ["LLM"]}, "rank/1": {"rank": 1, "nodes": ["snac"]}}
    return {"deployment": {"state": state, "endpoint": "http://x"}, "children": children, "ranks": ranks}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Answers of the supervisor, in order; an exception is raised."""
    answers: list[Any] = []

    class Admin:
        @classmethod
        def of(cls, run: RunDirectory) -> Admin:
            return cls()

        def snapshot(self) -> dict[str, Any]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)

    monkeypatch.setattr(starting, "AdminClient", Admin)
    return answers


@pytest.mark.parametrize(
    ("found", "step"),
    [
        (snapshot("starting", api=("ready", 0, 0), worker_0=("weights", 40, 100)), "worker-0: weights 40 %"),
        (
            snapshot("starting", api=("bind", 0, 0), worker_0=("device", 0, 0), worker_1=("spawn", 0, 0)),
            "worker-0: device, 1 more",
        ),
        (snapshot("starting", api=("bind", 0, 0)), "api: bind"),
        (snapshot("starting"), SPAWNING),
        (Unreachable("no socket yet"), SPAWNING),
    ],
)
def test_a_call_says_what_the_start_is_doing(found: Any, step: str, told: list[Any], tmp_path: Path) -> None:
    told.append(found)
    with pytest.raises(Unavailable) as refused:
        check_started(Run(tmp_path / "orpheus"), Printer(), is_waiting=False)
    assert refused.value.title == f"orpheus is starting ({step})"
    assert refused.value.exit_code == ExitCode.UNREACHABLE and "--wait" in refused.value.hint


def test_a_call_waits_until_the_start_is_complete(
    told: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = snapshot("starting", worker_0=("weights", 40, 100))
    told += [slow, slow, snapshot("starting", worker_0=("kernels", 0, 0)), snapshot("ready", worker_0=("ready", 0, 0))]
    waits: list[float] = []
    check_started(Run(tmp_path / "orpheus"), Printer(), is_waiting=True, sleep=waits.append)
    assert len(waits) == 3 and not told
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["orpheus is starting (worker-0: weights 40 %)", "orpheus is starting (worker-0: kernels)"]


def test_a_start_that_fails_ends_the_wait(told: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told.append(Unreachable("gone"))
    monkeypatch.setattr(Run, "is_held", False)
    monkeypatch.setattr(starting, "ending_of", lambda run: "failed: no memory")
    with pytest.raises(StartError, match="has ended") as failed:
        check_started(Run(tmp_path / "orpheus"), Printer(), is_waiting=True, sleep=lambda _: None)
    assert failed.value.detail == "failed: no memory"


def test_a_supervisor_that_is_busy_is_not_taken_for_a_start(told: list[Any], tmp_path: Path) -> None:
    (tmp_path / "orpheus").mkdir()
    (tmp_path / "orpheus" / "admin.sock").touch()
    told.append(Unreachable("silent"))
    check_started(Run(tmp_path / "orpheus"), Printer(), is_waiting=False)


def warnings(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    return (line for line in capsys.readouterr().err.splitlines() if "warning" in line)


def test_the_notice_of_a_miniature_is_shown_once_for_a_deployment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        warn_once("orpheus:mini is a miniature", RunDirectory(tmp_path), Printer())
    assert len(list(warnings(capsys))) == 1
    for _ in range(2):
        warn_once("orpheus:mini is a miniature", None, Printer())
    assert len(list(warnings(capsys))) == 2
    warn_once("", RunDirectory(tmp_path), Printer())
    assert not list(warnings(capsys))
