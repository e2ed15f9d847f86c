"""URLs of STUN and TURN servers (RFC 7064, RFC 7065). Read by checks of files."""

from __future__ import annotations

import re
from typing import Final

LAST_PORT: Final = 65535
TURN: Final = ("turn", "turns")

_URL: Final = re.compile(
    r"(?P<scheme>stuns?|turns?):(?P<host>[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"
    r"(?::(?P<port>\d{1,5}))?(?:\?transport=(?P<transport>udp|tcp))?",
    re.ASCII,
)


def ice_scheme(url: str) -> str | None:
    """Return the scheme of a server's URL: stun, stuns, turn or turns. None for other text.

    Only turn URLs name a transport; turns is TLS, so its transport is tcp. IPv6 addresses need a host name.
    """
    match = _URL.fullmatch(url)
    if match is None or not 1 <= int(match["port"] or 1) <= LAST_PORT:
        return None
    scheme, transport = match["scheme"], match["transport"]
    allowed = {"turn": (None, "udp", "tcp"), "turns": (None, "tcp")}.get(scheme, (None,))
    return scheme if transport in allowed else None
