"""End to end: a real deployment of the miniature, real sockets, `mstarctl top` in a pseudo-terminal of 80x24."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mstar_core.host.run_dir import RunDirectory
from mstarctl.client import AdminClient
from tests.fakes.ports import free_port
from tests.runtime.deployment import cache_dir
from tests.top.terminal import Terminal

LONG = ("--param", "max_output_tokens=8000", "--param", "ignore_eos=true")
WAIT_S = 250.0


def environment(runtime: Path) -> dict[str, str]:
    """Return an operator's environment with folders of this test."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "SSH_CONNECTION", "COLUMNS", "LINES")
    }
    return {
        **kept,
        "MSTAR_RUNTIME_DIR": str(runtime),
        "XDG_STATE_HOME": str(runtime / "state"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        "LANG": "C.UTF-8",
    }


def start(runtime: Path, *words: str) -> subprocess.Popen[bytes]:
    """Run a command in a process."""
    command = [sys.executable, "-m", "mstarctl", *words]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment(runtime), cwd=runtime, stdin=quiet, stdout=quiet, stderr=quiet)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    """Run orpheus:tiny in a folder."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    words = ("--host", "127.0.0.1", "--port", str(free_port()), "--cache-dir", str(cache_dir()))
    try:
        assert start(folder, "up", "orpheus:tiny", "-d", "--wait", *words).wait(WAIT_S) == 0
        yield folder
    finally:
        start(folder, "down", "--all", "--now").wait(WAIT_S)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def screen(runtime: Path) -> Iterator[Terminal]:
    """Run `mstarctl top` in a terminal."""
    terminal = Terminal([sys.executable, "-m", "mstarctl", "top"], environment(runtime))
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.timeout(600)
def test_a_request_appears_moves_and_ends_and_a_dead_worker_is_shown(runtime: Path, screen: Terminal) -> None:
    screen.shows("orpheus ● ready", WAIT_S)
    screen.shows("no requests")
    call = start(runtime, "call", "orpheus", "--text", "a long sentence", "--out", str(runtime / "a.wav"), *LONG)
    screen.shows("LLM ", WAIT_S)
    screen.shows("▶decode")
    screen.press("down", "enter")
    screen.shows("compute █")
    screen.shows("LLM decode")
    screen.press("x")
    screen.shows("Cancel ")
    screen.press("y")
    screen.shows("is being cancelled")
    assert call.wait(WAIT_S) != 0
    screen.press("escape")
    screen.hides("compute █")  # a key directly after an escape would be read with it
    screen.shows("cancelled")
    screen.press("2")
    screen.shows("╔═ SNAC")
    screen.press("5")
    screen.shows("serving")
    screen.press("1")

    worker = worker_of(runtime)
    os.kill(worker, signal.SIGKILL)
    screen.shows("worker-0 was killed by SIGKILL")
    screen.press("q")
    assert screen.process.wait(WAIT_S) == 0
    assert screen.attributes == screen.before
    assert not screen.modes & {"1049", "1000", "1002", "1003", "1006", "2004"}


def worker_of(runtime: Path) -> int:
    """Return the pid of rank 0."""
    before = os.environ.get("MSTAR_RUNTIME_DIR")
    os.environ["MSTAR_RUNTIME_DIR"] = str(runtime)
    try:
        snapshot = AdminClient.of(RunDirectory.of("orpheus")).snapshot()
    finally:
        os.environ.pop("MSTAR_RUNTIME_DIR")
        os.environ |= {"MSTAR_RUNTIME_DIR": before} if before is not None else {}
    return int(snapshot["children"]["worker-0"]["pid"])


@pytest.mark.timeout(600)
def test_a_signal_restores_the_terminal(runtime: Path, screen: Terminal) -> None:
    screen.shows("orpheus", WAIT_S)
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(WAIT_S) == 0
    assert screen.attributes == screen.before
    assert not screen.modes & {"1049", "1000", "1003", "1006"}
