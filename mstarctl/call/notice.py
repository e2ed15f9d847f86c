"""Notice of a miniature, shown once for each deployment of this host. Used by `call` and `chat`."""

from __future__ import annotations

from contextlib import suppress

from mstar_core.host.run_dir import RunDirectory
from mstarctl.output import Printer

SHOWN = "notice-shown"
"""Empty file in the run directory, which ends with the deployment."""


def warn_once(notice: str, run: RunDirectory | None, printer: Printer) -> None:
    """Warn with the notice of a model card, unless an earlier command has. run: None on another host: warn always."""
    if not notice:
        return
    with suppress(OSError):  # the folder of another user, or just removed: warn
        if run is not None:
            mark = run.path / SHOWN
            if mark.exists():
                return
            mark.touch(mode=0o600)
    printer.warn(notice)
