"""Groups of this host, for `--admin-group`: who else may read the admin socket."""

from __future__ import annotations

import grp
import stat
from pathlib import Path

from mstar_core.errors import ConfigError, nearest


def group_id(name: str) -> int:
    """The number of a group. Raises ConfigError with the nearest name."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        best = nearest(name, [group.gr_name for group in grp.getgrall()])
        hint = f"did you mean {best!r}?" if best else "getent group lists them"
        raise ConfigError(f"there is no group {name!r}", hint=hint, key="admin_group") from None


def closed_to(path: Path, gid: int) -> Path | None:
    """The first folder on the way to `path` (and itself) that members of a group cannot enter; None when all can."""
    for folder in reversed((path, *path.parents)):
        facts = folder.stat()
        mode = stat.S_IMODE(facts.st_mode)
        if not mode & (0o010 if facts.st_gid == gid else 0o001):
            return folder
    return None
