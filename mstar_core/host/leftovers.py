"""Processes of a deployment that have outlived their supervisor. Ended by the next `up` and by `ps --clear`."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from mstar_core.host.run_dir import RunDirectory

ENTRY: Final = "mstar_core.process.entry"
"""Module of the command line of each child."""

END_S: Final = 5.0
POLL_S: Final = 0.02


def leftovers(run: RunDirectory) -> list[int]:
    """Return the pids of this user's processes that were started for a run directory whose supervisor is gone."""
    if run.holder() not in (None, os.getpid()):
        return []
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(pid for pid in numbers if _is_child(pid, run))


def end_leftovers(run: RunDirectory) -> list[int]:
    """Kill these processes with their children, and wait until they are gone. Returns their pids."""
    pids = leftovers(run)
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + END_S
    while any(_is_child(pid, run) for pid in pids) and time.monotonic() < until:
        time.sleep(POLL_S)  # the kernel frees their memory and ports
    return pids


def _is_child(pid: int, run: RunDirectory) -> bool:
    with suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return False
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return ENTRY.encode() in words and os.fsencode(run.real.spec) in words
    return False
