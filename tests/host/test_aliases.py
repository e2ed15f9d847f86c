"""Names of run directories that replace another one: links to hidden directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar_core.errors import ConfigError, StartError
from mstar_core.host.run_dir import RunDirectory, deployments


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "r"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(path))
    monkeypatch.setattr("mstar_core.host.run_dir.SOCKET_PATH_LIMIT", 4096)  # a test's own path is long
    return path


@pytest.fixture
def new(root: Path) -> Iterator[RunDirectory]:
    """A deployment that starts to replace another one, and holds its lock."""
    run = RunDirectory.of("voice").successor
    run.create()
    run.spec.write_bytes(b"{}")
    lock = run.acquire()
    run.announce()
    yield run
    os.close(lock)


def test_a_successor_is_known_under_another_name_until_it_takes_that_of_the_old_one(
    root: Path, new: RunDirectory
) -> None:
    old = RunDirectory.of("voice")
    old.create()
    old.spec.write_bytes(b"{}")
    assert [(run.name, run.real) for run in deployments()] == [("voice", old), ("voice.next", new)]
    assert new.name == "voice"
    old.remove()
    new.take_name()
    assert [(run.name, run.real, run.holder()) for run in deployments()] == [("voice", new, os.getpid())]


def test_the_removal_of_the_old_one_leaves_its_successor_and_takes_its_own_names(root: Path, new: RunDirectory) -> None:
    new.take_name()
    third = RunDirectory.of("voice").real.successor
    third.create()
    third.announce()
    assert third.path != new.path and third.name == "voice"
    new.remove()
    assert sorted(path.name for path in root.iterdir()) == sorted([third.path.name, "voice.next"])
    third.take_name()
    RunDirectory.of("voice").remove()
    assert list(root.iterdir()) == []


def test_a_start_replaces_the_name_of_a_killed_one_and_no_other_link(root: Path) -> None:
    killed = RunDirectory.of("voice").successor
    killed.create()
    killed.announce()
    killed.take_name()
    again = RunDirectory.of("voice")
    again.create()
    assert again.real == again and [path.name for path in root.iterdir()] == ["voice"]
    (root / "other").symlink_to(again.path)
    with pytest.raises(ConfigError, match="open to other users"):
        RunDirectory.of("other").create()
    assert again.ipc.is_dir()


def test_a_name_that_another_successor_holds_is_refused(root: Path, new: RunDirectory) -> None:
    second = RunDirectory.of("voice").successor
    second.create()
    with pytest.raises(StartError, match="'voice.next' is already running"):
        second.announce()
