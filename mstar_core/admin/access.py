"""Access to the admin socket: its file with restricted mode, and the peers' credentials.

The file is bound here because a server library would create it accessible to all users.
"""

from __future__ import annotations

import enum
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import Refused, StartError
from mstar_core.host.run_dir import SOCKET_PATH_LIMIT

BACKLOG: Final = 64


def bind_admin(path: Path, gid: int | None = None, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Bind and listen with mode 0600, or 0660 for group `gid`. Replaces the file of a killed supervisor.

    Called under the run directory's lock and before any thread starts, because the umask is that of the process.
    Raises StartError if the path is too long or cannot be bound.
    """
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise StartError(
            "the admin socket's path is too long",
            f"{path}: {size} bytes, at most {SOCKET_PATH_LIMIT}",
            "choose a shorter --socket-path-prefix or --name",
        )
    sock = socket.socket(socket.AF_UNIX, kind)
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


class Access(enum.Enum):
    """Permissions of a peer."""

    ALL = "all"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Peer:
    """Credentials of the process at the other end when it connected."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: Any) -> Peer:
    """Return the peer of a unix socket. sock: a socket, or asyncio's wrapper of one."""
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))))


def access_of(peer: Peer, gid: int | None, owner: int | None = None) -> Access:
    """Return a peer's permissions: all for owner and root, read for members of group `gid`. Raises Refused."""
    if peer.uid in (0, os.getuid() if owner is None else owner):
        return Access.ALL
    if gid is not None and gid in groups_of(peer):
        return Access.READ
    raise Refused("this deployment belongs to another user", f"peer uid {peer.uid}", "ask its owner")


def groups_of(peer: Peer) -> set[int]:
    """Return the groups of a peer: its own, and those of its user."""
    try:
        user = pwd.getpwuid(peer.uid)
    except KeyError:
        return {peer.gid}
    return {peer.gid, *os.getgrouplist(user.pw_name, user.pw_gid)}
