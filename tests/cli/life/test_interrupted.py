"""Ctrl-C at any moment of `up`, as a shell sends it: exit status 130, one line, and nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mstar_core.errors import ExitCode
from mstarctl.commands.up import has_reader
from tests.fakes.ports import free_port
from tests.runtime.deployment import until

# The console script, after a line that says that the interpreter has started: before, a signal ends it without a word.
START = "import sys; from mstarctl.__main__ import main; print('begun', file=sys.stderr, flush=True); main()"
MOMENTS = (0.2, 1.6, 3.0)
MORE_MOMENTS = tuple(0.05 + 0.35 * step for step in range(20))
END_S = 60.0


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_a_start(moment: float, tmp_path: Path) -> None:
    interrupt_after(moment, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MORE_MOMENTS)
def test_ctrl_c_ends_a_start_at_any_moment(moment: float, tmp_path: Path) -> None:
    interrupt_after(moment, tmp_path)


def interrupt_after(seconds: float, folder: Path) -> None:
    """Run `up` attached, interrupt it after a time in seconds and check what is left. folder: for its run files."""
    words = [sys.executable, "-c", START, "up", "orpheus:tiny", "--host", "127.0.0.1", "--port", str(free_port())]
    run, state = folder / "r", folder / "s"
    environment = {
        **os.environ,
        "MSTAR_RUNTIME_DIR": str(run),
        "XDG_STATE_HOME": str(state),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NO_COLOR": "1",
    }
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None and up.stderr.readline() == "begun\n"
        time.sleep(seconds)
        up.send_signal(signal.SIGINT)
        out, err = up.communicate(timeout=END_S)
    assert (up.returncode, out) == (ExitCode.INTERRUPTED, ""), err
    assert "Traceback" not in err and "error:" not in err
    assert [path for path in run.iterdir()] == [] if run.exists() else True
    until(lambda: not processes_of(folder), f"the end of {processes_of(folder)}")


def processes_of(folder: Path) -> str:
    """Return the pids of the processes whose command lines name a folder."""
    return subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout


def test_up_ends_with_the_reader_of_its_output(tmp_path: Path) -> None:
    words = [sys.executable, "-c", START, "up", "orpheus:tiny", "--port", str(free_port())]
    environment = {
        **os.environ,
        "MSTAR_RUNTIME_DIR": str(tmp_path / "r"),
        "XDG_STATE_HOME": str(tmp_path / "s"),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NO_COLOR": "1",
    }
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr is not None
        next(line for line in up.stderr if "conductor" in line)  # its processes run
        up.stderr.close()
        assert up.wait(END_S) == ExitCode.INTERRUPTED
    assert list((tmp_path / "r").iterdir()) == []


def test_a_pipe_without_its_reader_is_noticed() -> None:
    read, write = os.pipe()
    assert has_reader(write)
    os.close(read)
    assert not has_reader(write)
    os.close(write)
