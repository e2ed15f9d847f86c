"""The ssh program and the options with which other hosts are reached. Used by commands and by gateways."""

from __future__ import annotations

import shutil
from typing import Final

from mstar_core.errors import Unreachable

ALIVE: Final = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""Options that detect a silent host after 15 s instead of many minutes."""

FORWARD: Final = (
    "-o",
    "ExitOnForwardFailure=yes",
    "-o",
    "StreamLocalBindUnlink=yes",
    "-o",
    "StreamLocalBindMask=0177",
    *ALIVE,
)
SOON: Final = ("-o", "ConnectTimeout=10")
"""Options of a connection to a host that may not answer at all."""

AGAIN: Final = ("-o", "BatchMode=yes")
"""Options of a connection that never prompts."""


def ssh() -> str:
    """Return the path of ssh. Raises Unreachable."""
    program = shutil.which("ssh")
    if program is None:
        raise Unreachable("ssh is not installed", hint="install the OpenSSH client, or run mstarctl on the other host")
    return program
