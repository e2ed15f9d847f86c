"""Gateways of this host: their start in a process of its own, and those that run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ExitCode, MstarError, NotFound, StartError, Unreachable, did_you_mean
from mstar_core.gateway.process.spec import GatewaySpec
from mstar_core.gateway.serve_file import ServeFile
from mstar_core.host.ports import check_port
from mstar_core.host.private_files import write_private
from mstar_core.host.run_dir import RunDirectory, gateways
from mstarctl.client import AdminClient
from mstarctl.client.deployments import ANSWER_S, Known, read_outcome
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


def find_gateway(name: str | None) -> RunDirectory:
    """Return the running gateway called `name`, or the only one. Raises NotFound with the nearest name."""
    live = {run.name: run for run in gateways() if run.holder() is not None}
    if name is None and len(live) == 1:
        return next(iter(live.values()))
    if name is not None and name in live:
        return live[name]
    if not live:
        raise NotFound("no gateway is running", hint="start one with: mstarctl serve", kind="gateway", name=name or "")
    if name is None:
        hint = f"name one of: {', '.join(sorted(live))}"
        raise NotFound(f"{len(live)} gateways are running", hint=hint, kind="gateway", name="")
    raise NotFound(f"no gateway {name!r} is running", hint=did_you_mean(name, live), kind="gateway", name=name)


def known_gateways(is_chosen: Callable[[str], bool] = lambda _: True) -> list[Known]:
    """Return the gateways of this host as `ps` lists them, by name."""
    return [_known(run) for run in gateways() if is_chosen(run.name)]


def _known(run: RunDirectory) -> Known:
    pid = run.holder()
    if pid is None:
        return Known(name=run.name, state="stale", run=run)
    try:
        with AdminClient.of(run, ANSWER_S) as admin:
            snapshot = admin.snapshot()
    except (Unreachable, MstarError):
        return Known(name=run.name, state="silent", run=run, pid=pid)
    head = snapshot["deployment"]
    return Known(
        name=run.name, state=str(head["state"]), run=run, pid=pid, snapshot=snapshot, log_dir=Path(head["log_dir"])
    )
