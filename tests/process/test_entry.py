"""Children end with their supervisor while they import, and the next start ends those that did not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from mstar_core.errors import ExitCode
from mstar_core.host.leftovers import ENTRY, end_leftovers, leftovers
from mstar_core.host.run_dir import RunDirectory

ENDLESS = "tests.fakes.endless_import"


@contextmanager
def begun(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process and wait until it, or its child, imports ENDLESS."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert output(process).readline() == "importing\n"
            yield process
        finally:
            process.kill()


def output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def entry(parent: int, *arguments: object) -> list[str]:
    return [sys.executable, "-m", ENTRY, str(parent), ENDLESS, *map(str, arguments)]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "dead")


@pytest.fixture
def left(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    with begun(entry(os.getpid(), run.spec)) as process:
        yield process


def test_a_child_ends_with_a_supervisor_that_is_killed_while_it_imports() -> None:
    lines = f"import os, subprocess\nsubprocess.run([*{entry(0)[:3]!r}, str(os.getpid()), {ENDLESS!r}])"
    with begun([sys.executable, "-c", lines]) as supervisor:
        supervisor.kill()
        assert output(supervisor).read() == "", "the output closes when the child has ended too"


def test_a_child_that_starts_after_the_death_of_its_supervisor_imports_nothing() -> None:
    late = subprocess.run(entry(os.getppid()), capture_output=True, text=True)  # not its parent: that one has died
    assert (late.returncode, late.stdout) == (ExitCode.INTERNAL, "")


def test_processes_without_a_supervisor_are_ended_and_no_others(
    run: RunDirectory, left: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert end_leftovers(RunDirectory(tmp_path / "other")) == []
    assert end_leftovers(run) == [left.pid]
    assert left.wait() < 0 and leftovers(run) == []


def test_processes_of_a_running_supervisor_are_no_leftovers(
    run: RunDirectory, left: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.path.mkdir(mode=0o700)
    lock = run.acquire()
    monkeypatch.setattr(os, "getpid", lambda: 0)  # the supervisor is another process than the one that looks
    assert leftovers(run) == [] and end_leftovers(run) == []
    os.close(lock)
    assert leftovers(run) == [left.pid]
