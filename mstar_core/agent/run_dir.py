"""Run directory of an agent: beside those of deployments, hidden, with a name that no deployment has."""

from __future__ import annotations

import logging
import os
import signal
import time
import zlib
from contextlib import suppress
from typing import Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import StartError
from mstar_core.host.leftovers import end_leftovers
from mstar_core.host.run_dir import RunDirectory, runtime_root

END_S: Final = 5.0
POLL_S: Final = 0.02

log = logging.getLogger(__name__)


def agent_directory(spec: DeploymentSpec, host: str) -> RunDirectory:
    """Return the run directory of a deployment's agent on this host.

    spec: of the supervisor. Its address and run directory tell apart deployments of the same name on two hosts, and the
    name of the host two agents on one machine.
    """
    owner = spec.hosts[0].address if spec.hosts else ""
    number = zlib.crc32("\n".join((owner, spec.run_dir, host)).encode())
    return RunDirectory(runtime_root() / f".{spec.name}@{number:08x}")


def take_directory(run: RunDirectory) -> int:
    """Create and lock the run directory; end what an earlier agent has left in it. Returns the lock to keep open.

    An earlier agent that still holds it has been replaced by this one: its supervisor believes it dead.
    """
    run.create()
    try:
        lock = run.acquire()
    except StartError:
        _end_holder(run)
        run.create()  # it may have removed the directory at its end
        lock = run.acquire()
    if ended := end_leftovers(run):
        log.warning("ended %d processes of an earlier agent: %s", len(ended), ", ".join(map(str, ended)))
    run.clean()
    return lock


def _end_holder(run: RunDirectory) -> None:
    until = time.monotonic() + END_S
    if pid := run.holder():
        log.warning("an earlier agent still runs (pid %d) and is killed", pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while run.holder() is not None and time.monotonic() < until:
        time.sleep(POLL_S)
