"""`mstarctl reload`: reads the files of API keys and of the certificate again."""

from __future__ import annotations

import typer

from mstarctl.client.reach import reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Printer
from mstarctl.output.units import counted


def reload(
    ctx: typer.Context,
    name: DeploymentName = None,
) -> None:
    """Read the files of API keys and the certificate again, without a restart."""
    printer = Printer.of(ctx)
    with reached(printer.options, name, serve=("reload",)) as target:
        read = target.admin.act("reload")
    keys = f"{counted(read['api_keys'], 'API key')}, {counted(read['metrics_keys'], 'metrics key')}"
    certificate = f", certificate {read['certificate']}" if read["certificate"] else ""
    printer.say(f"{target.name} has reloaded: {keys}{certificate}")
