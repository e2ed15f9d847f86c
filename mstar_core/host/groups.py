"""User groups of this host, for `--admin-group`, whose members may read the admin socket."""

from __future__ import annotations

import grp
import stat
from pathlib import Path

from mstar_core.errors import ConfigError, nearest


def group_id(name: str) -> int:
    """Return the id of a group. Raises ConfigError with the nearest name."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        best = nearest(name, [group.gr_name for group in grp.getgrall()])
        hint = f"did you mean {best!r}?" if best else "getent group lists them"
        raise ConfigError(f"there is no group {name!r}", hint=hint, key="admin_group") from None


def closed_to(path: Path, gid: int) -> Path | None:
    """Return the first folder on the way to `path`, or `path`, that the group cannot enter; None if none."""
    for folder in reversed((path, *path.parents)):
        facts = folder.stat()
        mode = stat.S_IMODE(facts.st_mode)
        if not mode & (0o010 if facts.st_gid == gid else 0o001):
            return folder
    return None
