"""`mstarctl down`: drains deployments, stops them, and waits until their processes are gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from mstar_core.errors import ExitCode, NotFound, Unreachable, UsageError
from mstar_core.host.run_dir import RunDirectory, deployments, gateways
from mstarctl.client import AdminClient
from mstarctl.client.deployments import find_known, find_running, forget
from mstarctl.client.gateways import running_gateways
from mstarctl.client.reach import context_of, reached
from mstarctl.complete import DeploymentNames
from mstarctl.output import Printer, duration_text
from mstarctl.output.durations import parse_duration

END_S = 60.0
"""Time limit after the drain: twice the ten seconds that children get, and a margin for a busy host."""

POLL_S = 0.1


def down(
    ctx: typer.Context,
    names: DeploymentNames = None,
    is_all: Annotated[bool, typer.Option("--all", help="stop every deployment of this host")] = False,
    is_now: Annotated[bool, typer.Option("--now", help="do not wait for requests in flight")] = False,
    grace: Annotated[str, typer.Option("--grace", metavar="TIME", help="time limit for requests in flight")] = "30s",
) -> None:
    """Drain deployments, then stop them."""
    printer = Printer.of(ctx)
    grace_s = 0.0 if is_now else parse_duration(grace, "--grace")
    if is_all and names:
        raise UsageError("a NAME and --all exclude each other", hint="omit one of them")
    is_here = printer.options.socket is None and context_of(printer.options).is_local
    if not is_here:
        if is_all:
            raise UsageError("--all stops the deployments of this host", hint="name the one to stop")
        items = [stop_there(printer, name, grace_s=grace_s, is_now=is_now) for name in one_or(names)]
    else:
        begun, runs = time.monotonic(), _chosen(names, is_all, printer)
        # All drain at the same time.
        asked = [(run, ask_stop(run, printer, grace_s=grace_s, is_now=is_now)) for run in runs]
        items = [await_end(run, pid, begun, printer, grace_s + END_S) for run, pid in asked]
    if printer.is_machine:
        printer.items("deployment", items, ())


def one_or(names: Sequence[str] | None) -> list[str | None]:
    """Return the names without repetitions; None, which means the only deployment, without any."""
    return list(dict.fromkeys(names)) if names else [None]


def stopped(name: str, begun: float, printer: Printer) -> dict[str, Any]:
    """Report a deployment that has ended, and return it as data. begun: monotonic time at which its stop began."""
    took_s = time.monotonic() - begun
    printer.say(f"{name} has stopped after {duration_text(took_s)}")
    return {"name": name, "state": "stopped", "took_s": round(took_s, 3)}


def stop_there(printer: Printer, name: str | None, *, grace_s: float, is_now: bool) -> dict[str, Any]:
    """Stop a deployment of another host and wait until its socket is gone. Raises Unreachable if it does not end."""
    with reached(printer.options, name) as target:
        begun = time.monotonic()
        printer.say(f"{target.name}: {'stopping' if is_now else 'draining, then stopping'}")
        target.admin.act("stop", **({"now": 1} if is_now else {"grace": int(grace_s)}))
        while time.monotonic() - begun < grace_s + END_S:
            try:
                target.admin.head()
            except Unreachable:
                return stopped(target.name, begun, printer)
            time.sleep(POLL_S)
        raise Unreachable(f"{target.name} does not end", f"its socket still answers after {grace_s + END_S:.0f} s")


def _chosen(names: Sequence[str] | None, is_all: bool, printer: Printer) -> list[RunDirectory]:
    """Return the deployments to stop. Raises NotFound before any of them is stopped."""
    if not is_all:
        matches = []
        for name in one_or(names):
            try:
                matches.append(running_gateways().get(name or "") or find_running(name))
            except NotFound as missing:
                raise _not_running(name, missing) from None
        return matches
    # Gateways come first, because one that still serves would load its models again.
    running = [run for run in (*gateways(), *deployments()) if run.holder() is not None]
    if not running:
        printer.say("no deployment is running")
        raise typer.Exit(ExitCode.NOT_FOUND)
    return running


def _not_running(name: str | None, missing: NotFound) -> NotFound:
    """Return the error for a deployment that is not running: it has ended, or it never existed."""
    if name is None:
        return missing
    with suppress(NotFound):
        known = find_known(name)
        if not known.is_running:
            if known.log_dir is not None:
                forget(known.log_dir)
            return NotFound(
                f"{name} is not running",
                f"its state is {known.state}; mstarctl ps lists it no longer",
                kind="deployment",
                name=name,
            )
    return missing


def ask_stop(run: RunDirectory, printer: Printer, *, grace_s: float, is_now: bool) -> int | None:
    """Make a supervisor drain and stop its deployment, and return its pid at once; None if it has just ended."""
    pid = run.holder()
    if pid is None:
        return None
    printer.say(f"{run.name}: {'stopping' if is_now else 'draining, then stopping'}")
    try:
        with AdminClient.of(run) as admin:
            admin.act("stop", **({"now": 1} if is_now else {"grace": int(grace_s)}))
    except Unreachable:  # a supervisor that does not answer still handles a signal
        if pid > 0 and run.holder() == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    return pid


def await_end(run: RunDirectory, pid: int | None, begun: float, printer: Printer, limit_s: float) -> dict[str, Any]:
    """Wait for the end of a deployment that is stopping. Raises Unreachable if it does not end in time."""
    if pid is not None:
        wait_gone(run, pid, limit_s)
    return stopped(run.name, begun, printer)


def wait_gone(run: RunDirectory, pid: int, limit_s: float) -> None:
    """Wait for the end of the supervisor, the last process to exit. Raises Unreachable after `limit_s`."""
    until = time.monotonic() + limit_s
    while _is_there(pid) and run.holder() in (pid, None):
        if time.monotonic() > until:
            hint = f"see mstarctl logs {run.name} --from supervisor, or end it: kill -9 {pid}"
            raise Unreachable(f"{run.name} does not end", f"pid {pid} still runs after {limit_s:.0f} s", hint)
        time.sleep(POLL_S)


def _is_there(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
