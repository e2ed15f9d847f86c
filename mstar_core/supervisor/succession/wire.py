"""Messages between the supervisors of a replaced deployment and of its successor, one packet each.

The successor sends a Claim. The answer is an Answer, with the locks of the GPUs as descriptors, then the listening
socket. Once the successor serves it sends SERVES. Each side learns of the other's end by the end of the connection.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import msgspec

from mstar_core.errors import StartError

KIND: Final = socket.SOCK_SEQPACKET
SERVES: Final = b"serves"
PACKET: Final = 64 * 1024
MOST_FDS: Final = 128


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Request for what a deployment holds. stop_first: it ends before the successor starts."""

    stop_first: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of the GPUs whose locks come with this packet, in their order; or why the deployment is not replaced."""

    gpus: tuple[str, ...] = ()
    title: str = ""
    detail: str = ""
    hint: str = ""
    code: str = ""


def connect(path: Path, limit_s: float) -> socket.socket:
    """Connect to the supervisor of the deployment to replace. Raises StartError."""
    channel = socket.socket(socket.AF_UNIX, KIND)
    channel.settimeout(limit_s)
    try:
        channel.connect(str(path))
    except OSError as error:
        channel.close()
        raise StartError(
            "the deployment to replace does not answer",
            f"{path}: {error.strerror or error}",
            "it has ended meanwhile, or another version of mstarctl started it: mstarctl ps",
            phase="plan",
        ) from error
    return channel
