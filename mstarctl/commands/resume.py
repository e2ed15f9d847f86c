"""`mstarctl resume`: let a drained deployment take requests again."""

from __future__ import annotations

from typing import Annotated

import typer

from mstar_core.config.run_dir import find
from mstar_core.errors import Unavailable
from mstarctl.client import AdminClient
from mstarctl.output import Printer


def resume(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="may be left out when only one runs")] = None,
) -> None:
    """Take new requests again after a drain."""
    run = find(name)
    with AdminClient.of(run) as admin:
        state = admin.act("resume")["state"]
    if state not in ("ready", "degraded"):
        raise Unavailable(f"{run.name} is {state} and cannot be resumed", hint=f"mstarctl ps {run.name}")
    Printer.of(ctx).say(f"{run.name} is {state} and takes requests")
