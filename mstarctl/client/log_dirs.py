"""Log folders of deployments, one for each start. Used by `up`, `ps` and `logs`."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from mstar_core.config.name import check_name
from mstar_core.config.resolved import KEEP_LOGS, LogConfig
from mstar_core.errors import ConfigError
from mstar_core.host.folders import obstacle
from mstar_core.host.log_starts import prune_starts


def state_root() -> Path:
    """Return the folder of logs and outcomes: in $MSTAR_RUNTIME_DIR if that is set, else $XDG_STATE_HOME/mstar."""
    chosen = os.environ.get("MSTAR_RUNTIME_DIR")
    if chosen and not os.environ.get("XDG_STATE_HOME"):
        return Path(chosen) / ".state"
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "mstar"


def check_log_dir(name: str) -> None:
    """Raise ConfigError if the log folder of a new start cannot be made. Writes nothing."""
    root = state_root() / check_name(name)
    why = obstacle(root)
    if why:
        raise _unwritable(root, why)


def new_log_dir(name: str, logs: LogConfig = KEEP_LOGS) -> Path:
    """Create the log folder of a new start and remove those of old starts. Raises ConfigError."""
    root = state_root() / check_name(name)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = _new_folder(root)
        prune_starts(root, keep=logs.keep_starts, max_days=logs.max_days, now=time.time())
        return folder
    except OSError as error:
        raise _unwritable(root, str(error.strerror)) from error


def _unwritable(root: Path, why: str) -> ConfigError:
    hint = "set XDG_STATE_HOME to a folder that you own"
    return ConfigError("the log folder cannot be written", f"{root}: {why}", hint)


def _new_folder(root: Path) -> Path:
    while True:
        path = root / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")[:-3]
        with suppress(FileExistsError):  # another start of this name in the same millisecond
            path.mkdir(mode=0o700)
            return path
