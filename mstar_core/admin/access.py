"""The admin socket's file: bound by us, because a server library would leave it open to everybody."""

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


class Access(enum.Enum):
    """What a peer may do."""

    ALL = "all"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as it was when it connected."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: Any) -> Peer:
    """The peer of a unix socket. sock: a socket, or asyncio's view of one."""
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))))


def access_of(peer: Peer, gid: int | None, owner: int | None = None) -> Access:
    """What a peer may do: the owner and root everything, members of group `gid` read. Raises Refused for others."""
    if peer.uid in (0, os.getuid() if owner is None else owner):
        return Access.ALL
    if gid is not None and gid in groups_of(peer):
        return Access.READ
    raise Refused("this deployment belongs to another user", f"peer uid {peer.uid}", "ask its owner")


def groups_of(peer: Peer) -> set[int]:
    """The groups of a peer: the one it runs under, and those that its user is a member of."""
    try:
        user = pwd.getpwuid(peer.uid)
    except KeyError:
        return {peer.gid}
    return {peer.gid, *os.getgrouplist(user.pw_name, user.pw_gid)}
