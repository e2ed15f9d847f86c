"""`mstarctl hosts`: lists the hosts of a deployment, or of a Ray cluster before any deployment."""

from __future__ import annotations

from typing import Annotated

import typer

from mstar_core.errors import UsageError
from mstarctl.client.reach import known_at, only_here
from mstarctl.complete import DeploymentName
from mstarctl.objects import cluster
from mstarctl.objects.hosts import COLUMNS, cells, host_items
from mstarctl.output import Printer

ONE_HOST_LACKS = ("address", "round_trip", "version")
"""Columns that only a deployment with several hosts fills."""

RayAddress = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="the Ray cluster: HOST:PORT of its head, or auto for this host's"),
]


def hosts(ctx: typer.Context, name: DeploymentName = None, ray: RayAddress = None) -> None:
    """List the hosts of a deployment, or of a Ray cluster."""
    printer = Printer.of(ctx)
    if ray is not None:
        if name is not None:
            raise UsageError("--ray shows a cluster, not a deployment", hint=f"omit {name!r} or --ray")
        only_here(printer.options, "hosts --ray")
        _show_cluster(ray, printer)
        return
    items = host_items(known_at(printer.options, name))
    shown = items if printer.is_machine else [cells(item) for item in items]
    columns = COLUMNS if any(item.get("reason") for item in items) else COLUMNS[:-1]
    if len(items) == 1 and printer.format != "wide":
        columns = tuple(column for column in columns if column.key not in ONE_HOST_LACKS)
    printer.items("host", shown, columns)


def _show_cluster(address: str, printer: Printer) -> None:
    from mstar_core.cluster.survey import survey

    view = survey(address, cluster.compared_packages())
    has_note = any(host.fault for host in view.hosts)
    shown = cluster.cluster_items(view) if printer.is_machine else [cluster.cluster_cells(h) for h in view.hosts]
    printer.say(f"Ray {view.version} at {view.address}")
    printer.items("host", shown, cluster.COLUMNS if has_note else cluster.COLUMNS[:-1])
