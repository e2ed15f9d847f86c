"""Installed version of the tool. Read by `mstarctl version` and recorded in every deployment's specification."""

from __future__ import annotations

from importlib import metadata

UNINSTALLED = "0+source"


def client_version() -> str:
    """Return the version of the installed tool; `0+source` when it runs from a folder that was never installed."""
    try:
        return metadata.version("mstarctl")
    except metadata.PackageNotFoundError:
        return UNINSTALLED
