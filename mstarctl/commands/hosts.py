"""`mstarctl hosts`: lists the hosts of a deployment."""

from __future__ import annotations

import typer

from mstarctl.client.reach import known_at
from mstarctl.complete import DeploymentName
from mstarctl.objects.hosts import COLUMNS, cells, host_items
from mstarctl.output import Printer


def hosts(ctx: typer.Context, name: DeploymentName = None) -> None:
    """List the hosts of a deployment."""
    printer = Printer.of(ctx)
    known = known_at(printer.options, name)
    items = host_items(known)
    shown = items if printer.is_machine else [cells(item) for item in items]
    columns = COLUMNS if any(item.get("reason") for item in items) else COLUMNS[:-1]
    if len(items) == 1 and printer.format != "wide":
        columns = tuple(column for column in columns if column.key not in ("address", "round_trip", "version"))
    printer.items("host", shown, columns)
