"""GPU locks: one holder, named in the error of a second start, released when its process exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, acquire_gpus, gpu_holder, lock_path, release

TWO = {"cuda:0": "GPU-aaaa", "cuda:1": "GPU-bbbb"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


def test_a_free_gpu_has_no_holder_and_looking_makes_nothing(folder: Path) -> None:
    assert gpu_holder("GPU-aaaa") is None
    assert not folder.exists()


def test_the_second_is_told_who_holds_it_and_takes_nothing() -> None:
    held = acquire_gpus({"cuda:1": "GPU-bbbb"}, "first")
    with pytest.raises(StartError) as refused:
        acquire_gpus(TWO, "second")
    assert refused.value.title == "GPU 1 is in use" and refused.value.code == "gpu_in_use"
    assert f"'first' (pid {os.getpid()}" in refused.value.detail and "mstarctl down first" in refused.value.hint
    assert gpu_holder("GPU-aaaa") is None, "a start that was refused keeps none of its locks"
    release(held)
    release(acquire_gpus(TWO, "second"))


def test_a_killed_holder_leaves_nothing_behind() -> None:
    body = (
        "import sys\nfrom mstar_core.host.gpu_locks import acquire_gpus\n"
        "kept = acquire_gpus({'cuda:0': 'GPU-aaaa'}, 'other')\nprint('held', flush=True)\nsys.stdin.read()\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        holder = gpu_holder("GPU-aaaa")
        assert holder is not None and (holder.pid, holder.name) == (other.pid, "other")
        other.kill()
        other.wait(60)
    assert gpu_holder("GPU-aaaa") is None
    release(acquire_gpus({"cuda:0": "GPU-aaaa"}, "next"))


def test_a_key_cannot_leave_the_folder(folder: Path) -> None:
    assert lock_path("../../etc/passwd").parent == folder


def test_a_link_in_place_of_a_lock_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "target").write_text("kept")
    (folder / "GPU-aaaa").symlink_to(tmp_path / "target")
    with pytest.raises(StartError, match="lock of a GPU"):
        acquire_gpus({"cuda:0": "GPU-aaaa"}, "x")
    assert (tmp_path / "target").read_text() == "kept"
