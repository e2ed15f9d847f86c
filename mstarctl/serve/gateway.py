"""Start of a gateway of this host in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ExitCode, MstarError, StartError, Unreachable
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.host.ports import check_port
from mstar_core.host.private_files import write_private
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client import AdminClient
from mstarctl.client.deployments import read_outcome
from mstarctl.client.log_dirs import new_log_dir, state_root
from mstarctl.client.log_lines import place_of_last_error

MODULE: Final = "mstar_core.gateway"
NAME: Final = "gateway"
LOG: Final = "gateway.log"
POLL_S: Final = 0.1
START_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedGateway:
    """A gateway that this process has started; its keeper is a child of this process."""

    spec: GatewaySpec
    run: RunDirectory
    process: subprocess.Popen[bytes]

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


def start_gateway(name: str, serve: ServeFile, log_level: str, argv: tuple[str, ...]) -> StartedGateway:
    """Start a gateway in a process of its own. Raises StartError if one of this name runs, or the port is taken."""
    run = RunDirectory.of_gateway(name)
    if (pid := run.holder()) is not None:
        raise StartError(
            f"gateway {name!r} is already running",
            f"pid {pid}",
            f"stop it with: mstarctl serve down {name}, or choose another --name and --port",
            phase="plan",
            code="name_in_use",
        )
    check_port(serve.host, serve.port)
    run.create()
    state_dir = state_root() / ".gateways" / name
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    spec = GatewaySpec(
        name=name,
        run_dir=str(run.path),
        log_dir=str(new_log_dir(name)),
        state_dir=str(state_dir),
        serve=serve,
        log_level=log_level,
        argv=argv,
    )
    path = Path(spec.log_dir) / "start.json"
    write_private(path, spec.encode())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(word).absolute()) for word in sys.path if word)}
    with (Path(spec.log_dir) / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=environment,
        )
    return StartedGateway(spec=spec, run=run, process=process)


def wait_serving(started: StartedGateway) -> dict[str, Any]:
    """Wait until a gateway answers, and return its head. Raises StartError with its cause if it ends before."""
    until = time.monotonic() + START_S
    while not started.has_ended and time.monotonic() < until:
        try:
            with AdminClient.of(started.run) as admin:
                head = admin.head()
        except Unreachable:
            time.sleep(POLL_S)
            continue
        if head["pid"] == started.process.pid:
            return head
        time.sleep(POLL_S)
    raise ending(started)


def ending(started: StartedGateway) -> MstarError:
    """Return the error of a gateway that ended, or does not answer."""
    outcome = read_outcome(Path(started.spec.log_dir)) or {}
    cause = outcome.get("cause") or {}
    title = str(cause.get("message") or "the gateway ended")
    log = place_of_last_error(Path(started.spec.log_dir) / LOG)
    error = StartError(title, str(cause.get("detail", "")), str(cause.get("hint", "")), phase="spawn", log=log)
    code = int(outcome.get("exit_code") or ExitCode.START_FAILED)
    error.exit_code = ExitCode(code) if code in {int(known) for known in ExitCode} else ExitCode.START_FAILED
    return error
