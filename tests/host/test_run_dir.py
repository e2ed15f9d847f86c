"""Lock of a run directory: its holder, while other processes look at it and while it is removed."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path, PosixPath
from typing import IO, Any

import pytest

from mstar_core.errors import StartError
from mstar_core.host.run_dir import RunDirectory, lock_soon


class Vanishing(PosixPath):
    """A path whose file is removed once it is open: the deployment ends while another process looks at its lock."""

    def open(self, *args: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        file = super().open(*args, **options)
        self.unlink()
        return file


def held(path: Path) -> tuple[RunDirectory, int]:
    """Return a run directory without its folders, and the descriptor of its lock, which is held."""
    run = RunDirectory(path)
    return run, run.acquire()


def test_the_holder_of_a_lock_that_is_removed_meanwhile_is_still_known(tmp_path: Path) -> None:
    run, lock = held(tmp_path)
    assert RunDirectory(Vanishing(tmp_path)).holder() == os.getpid()
    assert run.holder() is None, "no file, no holder"
    os.close(lock)


def test_a_look_at_a_lock_is_no_holder_for_another_look(tmp_path: Path) -> None:
    run, lock = held(tmp_path)
    os.close(lock)
    with run.lock.open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        assert run.holder() is None


def test_a_start_waits_for_a_look_at_its_lock_and_not_for_another_deployment(tmp_path: Path) -> None:
    run, lock = held(tmp_path)
    with pytest.raises(StartError, match="already running") as refused:
        run.acquire()
    assert refused.value.detail == f"pid {os.getpid()}"
    os.close(lock)

    with run.lock.open() as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        with run.lock.open("r+") as file:
            assert not lock_soon(file.fileno(), limit_s=0.0), "it ends even if a look does not"
        taken: list[int] = []
        start = threading.Thread(target=lambda: taken.append(run.acquire()))
        start.start()
    start.join()
    assert run.holder() == os.getpid()
    os.close(taken[0])
