"""Logs by size and by days, with a clock of the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mstar_core.config.resolved import LogConfig
from mstar_core.conformance.clock import FakeClock
from mstar_core.host.log_starts import DAY_S, prune_starts
from mstar_core.supervisor.log_file import LogFile
from mstarctl.client.log_dirs import new_log_dir

NOW = 1_000_000_000.0


def starts(root: Path, ages: list[float]) -> list[Path]:
    """Make one folder per start, the oldest first. ages: days since its last line."""
    made = []
    for number, age in enumerate(ages):
        folder = root / f"2026-01-{number + 1:02}T00-00-00.000"
        folder.mkdir(parents=True)
        for path in (folder / "api.log", folder):
            path.touch()
            os.utime(path, (NOW - age * DAY_S, NOW - age * DAY_S))
        made.append(folder)
    return made


def left(root: Path) -> int:
    return len(list(root.iterdir()))


def test_the_last_starts_stay(tmp_path: Path) -> None:
    made = starts(tmp_path, [5, 4, 3, 2, 1])
    assert prune_starts(tmp_path, keep=3, max_days=None, now=NOW) == made[:2]
    assert left(tmp_path) == 3


def test_starts_whose_last_line_is_too_old_go_and_the_newest_stays(tmp_path: Path) -> None:
    made = starts(tmp_path, [40, 31, 29, 35])
    assert prune_starts(tmp_path, keep=10, max_days=30, now=NOW) == made[:2], "the newest one may be running"


def test_a_new_start_prunes_by_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = [new_log_dir("x", LogConfig(keep_starts=2)) for _ in range(4)]
    assert sorted((tmp_path / "mstar" / "x").iterdir()) == sorted(folders)[-2:]


def test_a_log_is_rotated_at_its_size(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "api.log", LogConfig(max_bytes=100))
    for number in range(12):
        log.append(f"line {number:04}\n".encode())
    log.close()
    assert (tmp_path / "api.log.1").stat().st_size > 100 >= (tmp_path / "api.log").stat().st_size


def test_a_log_is_rotated_at_half_of_its_days(tmp_path: Path) -> None:
    clock = FakeClock(0.0)
    log = LogFile(tmp_path / "api.log", LogConfig(max_days=2), clock)
    log.append(b"first\n")
    clock.now += DAY_S - 1
    log.append(b"second\n")
    assert not (tmp_path / "api.log.1").exists()
    clock.now += 2
    log.append(b"third\n")
    log.append(b"fourth\n")
    log.close()
    assert (tmp_path / "api.log.1").read_bytes() == b"first\nsecond\nthird\n"
    assert (tmp_path / "api.log").read_bytes() == b"fourth\n"
