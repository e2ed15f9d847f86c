"""The admin socket's file: bound by us, because a server library would leave it open to everybody."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

from mstar_core.errors import StartError
from mstar_core.host.run_dir import SOCKET_PATH_LIMIT

BACKLOG: Final = 64


def bind_admin(path: Path, gid: int | None = None) -> socket.socket:
    """Bind and listen, 0600, or 0660 for group `gid`. A file that a killed supervisor left is replaced.

    Called under the run directory's lock and before any thread starts: the umask belongs to the whole process.
    Raises StartError with the length when the path is too long, with the reason when it cannot be bound.
    """
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise StartError(
            "the admin socket's path is too long",
            f"{path}: {size} bytes, at most {SOCKET_PATH_LIMIT}",
            "choose a shorter --socket-path-prefix or --name",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177 if gid is None else 0o117)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
        if gid is not None:
            os.chown(path, -1, gid)
    except OSError as error:
        sock.close()
        raise StartError(
            "the admin socket cannot be opened", f"{path}: {error.strerror}", "choose another --socket-path-prefix"
        ) from error
    finally:
        os.umask(before)
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock
