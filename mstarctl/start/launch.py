"""Launch of a deployment's supervisor in its own process, and the wait for its start. Used by `up`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ExitCode, MstarError, StartError, Unreachable
from mstar_core.host.cache_dir import bytecode_environment
from mstar_core.host.groups import group_id
from mstar_core.host.private_files import write_private
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client import AdminClient
from mstarctl.client.deployments import read_outcome
from mstarctl.client.log_dirs import new_log_dir
from mstarctl.client.log_lines import place_of_last_error

SUPERVISOR: Final = "mstar_core.supervisor"
POLL_S: Final = 0.1
END_S: Final = 60.0
"""Longest time that a supervisor takes to end its children."""

READY: Final = ("ready", "degraded", "unhealthy", "draining")

Watch = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A supervisor that this process has started; it is a child of this process."""

    spec: DeploymentSpec
    run: RunDirectory
    process: subprocess.Popen[bytes]

    @property
    def log_dir(self) -> Path:
        return Path(self.spec.log_dir)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


def launch(spec: DeploymentSpec, run: RunDirectory, module: str = SUPERVISOR) -> Started:
    """Create the run and log directories, and start the supervisor by name, detached from this terminal."""
    run.create(None if spec.admin_group is None else group_id(spec.admin_group))
    spec = msgspec.structs.replace(spec, log_dir=str(new_log_dir(spec.name, spec.logs)))
    path = Path(spec.log_dir) / "start.json"  # not in the run directory, which another start of the name clears
    write_private(path, spec.encode())
    paths = os.pathsep.join(word for word in map(_absolute, sys.path) if word)
    environment = {**os.environ, **bytecode_environment(spec.cache_dir), "PYTHONPATH": paths}
    with open(Path(spec.log_dir) / "supervisor.log", "ab") as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        except OSError as error:
            raise StartError("the supervisor cannot be started", error.strerror or str(error), phase="spawn") from error
    return Started(spec=spec, run=run, process=process)


def _absolute(word: str) -> str:
    return str(Path(word).absolute()) if word else os.getcwd()


def wait_ready(started: Started, watch: Watch, *, until_known: bool = False) -> dict[str, Any]:
    """Follow a start until it is ready and return the snapshot. Raises the cause if it fails.

    watch: called with each snapshot. until_known: return as soon as the supervisor answers.
    """
    with AdminClient.of(started.run) as admin:
        while not started.has_ended:
            snapshot = _ask(admin)
            # If another start of the same name came first, its socket answers and our supervisor ends soon.
            if snapshot is not None and snapshot["deployment"]["pid"] == started.process.pid:
                watch(snapshot)
                state = snapshot["deployment"]["state"]
                if state in READY or until_known and state == "starting":
                    return snapshot
                if state in ("failed", "stopping"):
                    wait_end(started)
                    break
            time.sleep(POLL_S)
    raise failure_of(started)


def wait_named(started: Started) -> None:
    """Wait until a deployment that replaces another one has its name. Raises the cause if it ends before."""
    named = RunDirectory(started.run.path.with_name(started.spec.name))
    while named.real != started.run:
        if started.has_ended:
            raise failure_of(started)
        time.sleep(POLL_S)


def _ask(admin: AdminClient) -> dict[str, Any] | None:
    try:
        return admin.snapshot()
    except Unreachable:  # the socket is not there yet, or is gone; the process state tells which
        return None


def wait_end(started: Started) -> None:
    """Wait for the supervisor's process. Raises Unreachable if it does not end in time."""
    try:
        started.process.wait(END_S)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(
            f"the supervisor of {started.spec.name!r} does not end", f"pid {started.process.pid}"
        ) from error


def failure_of(started: Started) -> MstarError:
    """Return the error of a deployment that ended."""
    outcome = read_outcome(started.log_dir)
    if outcome is None:
        status = started.process.poll()
        detail = f"its exit status is {status}, and it recorded no outcome"
        return StartError(
            "the supervisor ended", detail, phase="spawn", log=place_of_last_error(started.log_dir / "supervisor.log")
        )
    return outcome_error(outcome, started.log_dir)


def outcome_error(outcome: dict[str, Any], log_dir: Path) -> MstarError:
    """Return the error of a recorded outcome: cause, process and phase, detail, hint, log line, exit code."""
    cause = outcome.get("cause") or {}
    title = str(cause.get("message") or outcome.get("reason") or "the deployment ended")
    where = f"in {cause['name']}, phase {cause['phase']}" if cause.get("name") and cause.get("phase") else ""
    detail = "\n".join(part for part in (str(cause.get("detail") or ""), where) if part)
    log = Path(str(cause.get("log") or log_dir / f"{cause.get('name', 'supervisor')}.log"))
    error = StartError(
        title, detail, str(cause.get("hint") or ""), code=cause.get("code"), log=place_of_last_error(log)
    )
    code = int(outcome.get("exit_code", ExitCode.START_FAILED))
    error.exit_code = ExitCode(code) if code in {int(known) for known in ExitCode} and code else ExitCode.START_FAILED
    return error
