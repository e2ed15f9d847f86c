"""`mstarctl version`: the tool, the plugin API and the installed plugins."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from mstar_core.plugin.entries import API_VERSION, plugin_entries
from mstarctl.output import Printer

UNINSTALLED = "0+source"


def client_version() -> str:
    """The version of the installed tool; `0+source` when it runs from a folder that was never installed."""
    try:
        return metadata.version("mstarctl")
    except metadata.PackageNotFoundError:
        return UNINSTALLED


def version(ctx: typer.Context) -> None:
    """Show the versions of the tool, the plugin API and the plugins."""
    plugins = [{"name": e.name, "distribution": e.distribution, "version": e.version} for e in plugin_entries()]
    facts = {
        "name": "mstarctl",
        "client": client_version(),
        "python": platform.python_version(),
        "plugin_api": API_VERSION,
        "plugins": plugins,
    }
    lines = [f"mstarctl    {facts['client']}", f"python      {facts['python']}", f"plugin API  {API_VERSION}"]
    lines += [f"plugin      {p['name']} ({p['distribution']} {p['version']})" for p in plugins]
    Printer.of(ctx).item("version", facts, lines)
