"""Who speaks on the admin socket, by the kernel's word, and what they may do."""

from __future__ import annotations

import enum
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Any

from mstar_core.errors import Refused


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
