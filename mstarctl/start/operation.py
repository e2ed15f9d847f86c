"""Progress of an operation on a running deployment, such as a rolling restart. Used by the commands that begin one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from mstar_core.errors import StartError, Unreachable
from mstarctl.client.admin import AdminClient

POLL_S: Final = 0.2
STEP_PERCENT: Final = 10
"""Least progress between two lines about it."""


def follow(admin: AdminClient, operation: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Report the steps of an operation until it has ended. Returns the head of the deployment.

    Raises StartError if the operation fails, Unreachable if the deployment ends.
    """
    said, shown = 0, -STEP_PERCENT
    while True:
        head = admin.head()
        latest = head["operation"] or {}
        if latest.get("number") != operation["number"]:
            raise Unreachable(f"the {operation['kind']} is not known any more", "its supervisor was started again")
        for step in latest["steps"][said:]:
            said += 1
            say(f"  {said} of {latest['total']}  {step}")
        percent = percent_of(head)
        if percent is not None and percent >= shown + STEP_PERCENT:
            shown = percent // STEP_PERCENT * STEP_PERCENT
            say(f"  {head['phase']} {percent} %")
        if latest["state"] == "failed":
            detail = f"{latest['done']} of {latest['total']} steps were done: {latest['step']} failed"
            raise StartError(latest["error"], detail, latest["hint"] or f"mstarctl logs {admin.name}")
        if latest["state"] == "done":
            return head
        if head["state"] == "stopping":
            raise Unreachable(f"{admin.name} was stopped during the {operation['kind']}", head["reason"])
        time.sleep(POLL_S)


def percent_of(head: Mapping[str, Any]) -> int | None:
    """Return the progress of a deployment that starts or wakes, in percent of its bytes; None if it is not known."""
    done, total = int(head.get("done") or 0), int(head.get("total") or 0)
    return min(100, 100 * done // total) if total and head.get("phase") else None
