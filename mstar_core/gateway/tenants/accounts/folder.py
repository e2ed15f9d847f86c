"""Folder of tenants and usage, one for all gateways of a user. Gateways and `mstarctl` find it by the same rules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from mstar_core.errors import ConfigError
from mstar_core.host.folders import obstacle

NAME: Final = ".gateways"
"""Beside the log folders of deployments, whose names begin with a letter. Folders in it are of one gateway each."""


def gateway_folder() -> Path:
    """Return the folder: in $MSTAR_RUNTIME_DIR/.state if only that is set, else in $XDG_STATE_HOME/mstar."""
    chosen, home = os.environ.get("MSTAR_RUNTIME_DIR"), os.environ.get("XDG_STATE_HOME")
    if chosen and not home:
        return Path(chosen) / ".state" / NAME
    return (Path(home) if home else Path.home() / ".local" / "state") / "mstar" / NAME


def made(folder: Path) -> Path:
    """Create the folder with mode 0700 if it is missing, and return it. Raises ConfigError."""
    why = obstacle(folder)
    if not why:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            why = str(error)
    if why:
        hint = "set XDG_STATE_HOME to a folder that you own"
        raise ConfigError("the gateway's state folder cannot be written", why, hint)
    return folder
