"""Other deployments of this host, for the menu of the web page. Used by `routes.console`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mstar_core.host.run_dir import RunDirectory, deployments


def neighbours(run_dir: str) -> list[dict[str, Any]]:
    """Return name, model and address of the other running deployments that show a page. Reads files.

    They are those beside `run_dir`, so of the same user. Nothing else of their configuration is returned.
    """
    this = Path(run_dir)
    shown = (_shown(run) for run in deployments(this.parent) if run.real.path != this and run.holder() is not None)
    return [item for item in shown if item is not None]


def _shown(run: RunDirectory) -> dict[str, Any] | None:
    try:
        spec = msgspec.json.decode(run.spec.read_bytes())
        api = spec["api"]
        if not api["console"]:
            return None
        return {
            "name": run.name,
            "model": str(spec["model"]),
            "host": str(api["host"]),
            "port": int(api["port"]),
            "is_tls": api.get("tls_cert") is not None,
        }
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
        return None  # it ended in between, or another version wrote its file
