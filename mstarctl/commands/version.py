"""`mstarctl version`: shows versions of the tool, running deployments, admin and plugin APIs, and plugins."""

from __future__ import annotations

import platform
from typing import Any

import typer

from mstar_core.plugin.loader import plugin_entries
from mstar_core.plugin.spec import API_VERSION
from mstarctl.output import Printer
from mstarctl.output.options import GlobalOptions
from mstarctl.version import client_version


def version(ctx: typer.Context) -> None:
    """Show the versions of the tool, the plugin API and the plugins."""
    from mstarctl.client.admin import API, MIN_API

    printer = Printer.of(ctx)
    plugins = [{"name": e.name, "distribution": e.distribution, "version": e.version} for e in plugin_entries()]
    servers = running_servers(printer.options)
    facts = {
        "name": "mstarctl",
        "client": client_version(),
        "python": platform.python_version(),
        "admin_api": {"min": MIN_API, "max": API},
        "plugin_api": API_VERSION,
        "servers": servers,
        "plugins": plugins,
    }
    lines = [f"mstarctl    {facts['client']}", f"python      {facts['python']}"]
    lines += [f"admin API   {MIN_API} to {API}", f"plugin API  {API_VERSION}"]
    lines += [
        f"server      {s['name']}  mstarctl {s['version']}, admin API {s['min_api']} to {s['api']}" for s in servers
    ]
    lines += [f"plugin      {p['name']} ({p['distribution']} {p['version']})" for p in plugins]
    printer.item("version", facts, lines)


def running_servers(options: GlobalOptions) -> list[dict[str, Any]]:
    """Return the versions of running deployments of this host, or of the one that --context or --socket reaches."""
    from mstar_core.errors import MstarError
    from mstarctl.client.admin import AdminClient
    from mstarctl.client.deployments import ANSWER_S
    from mstarctl.client.reach import context_of, reached

    if options.socket is not None or not context_of(options).is_local:
        with reached(options, None) as target:
            return [_server(target.admin)]
    from mstar_core.host.run_dir import deployments

    servers = []
    for run in deployments():
        if run.holder() is not None:
            try:
                servers.append(_server(AdminClient.of(run, ANSWER_S)))
            except MstarError:  # a silent supervisor; `ps` reports it
                continue
    return servers


def _server(admin: Any) -> dict[str, Any]:
    head = admin.get("/v1/")
    facts = {
        "version": head.get("versions", {}).get("mstarctl"),
        "api": head.get("api"),
        "min_api": head.get("min_api"),
    }
    return {"name": head.get("name"), **facts}
