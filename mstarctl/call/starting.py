"""Deployments that are starting: what they do now, and the wait until they accept requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from mstar_core.errors import MstarError, StartError, Unavailable, Unreachable
from mstar_core.host.run_dir import RunDirectory
from mstarctl.client.admin import AdminClient
from mstarctl.client.deployments import ending_of
from mstarctl.output import Printer
from mstarctl.start.progress import rows_of

POLL_S: Final = 0.5
SPAWNING: Final = "its processes are being started"


def check_started(
    run: RunDirectory, printer: Printer, *, is_waiting: bool, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Return if the deployment is not starting, or, with is_waiting, when its start is complete.

    Raises Unavailable if it is starting, and StartError if its start fails during the wait.
    """
    said = ""
    while (step := step_of_start(run)) is not None:
        if not is_waiting:
            raise Unavailable(
                f"{run.name} is starting ({step})",
                hint=f"mstarctl call {run.name} --wait waits until it is ready",
                code="starting",
            )
        if step != said:
            printer.say(f"{run.name} is starting ({step})")
            said = step
        sleep(POLL_S)


def step_of_start(run: RunDirectory) -> str | None:
    """Return what a start is doing, such as `worker-0: weights 40 %`; None if the deployment is not starting.

    Raises StartError if the deployment has ended.
    """
    try:
        snapshot = AdminClient.of(run).snapshot()
    except Unreachable:
        if run.holder() is not None:
            return None if run.admin_socket.exists() else SPAWNING
        raise StartError(f"{run.name} has ended", ending_of(run), f"mstarctl logs {run.name}") from None
    except MstarError:
        return None
    return told(snapshot) if snapshot["deployment"]["state"] == "starting" else None


def told(snapshot: dict[str, Any]) -> str:
    """Return the steps of the processes that are not ready, the ranks first."""
    waiting = [row for row in rows_of(snapshot) if not row.is_ready]
    if not waiting:
        return SPAWNING
    ranks = [row for row in waiting if row.who.startswith("rank ")] or waiting
    first = ranks[0]
    share = f" {100 * first.share:.0f} %" if first.total > 0 else ""
    more = f", {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"{first.who.replace('rank ', 'worker-')}: {first.phase}{share}{more}"
