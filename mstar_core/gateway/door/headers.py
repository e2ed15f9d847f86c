"""Headers of forwarded requests and answers: those of one hop are removed, all others pass untouched.

Source: RFC 9110, section 7.6.1.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from multidict import CIMultiDict

from mstar_core.gateway.parts import Replica

HOP: Final = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
SOCKET: Final = "sec-websocket-"
"""Start of the headers of a WebSocket handshake, which each hop makes anew."""

MODEL: Final = "x-mstar-model"
"""Header that names the model of a request whose body and path do not."""

KEYS: Final = ("authorization", "x-api-key", "api-key")
SECRET: Final = "ek_"
"""Start of a client secret, a key that a deployment made. It passes as it is."""

KEY_PROTOCOL: Final = "openai-insecure-api-key."
"""Start of the WebSocket protocol in which browsers send their key, because they cannot set headers."""

REQUEST_ID: Final = "X-Request-ID"
FORWARDED: Final = "X-Forwarded-For"
CACHE_SCOPE: Final = "X-Mstar-Cache-Scope"
"""Header by which the deployment, whose key all tenants share, keeps their cached prefixes and media apart."""

FORWARDED_PREFIX: Final = "X-Forwarded-Prefix"
"""Header with the beginning of the path that the gateway has taken off, for descriptions of routes."""

_CLIENT_ID: Final = re.compile(r"[!-.0-~]{1,128}")
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS: Final = tuple(first + second for first in _CROCKFORD for second in _CROCKFORD)


def request_headers(
    headers: Mapping[str, str],
    replica: Replica,
    request_id: str,
    peer: str,
    *,
    takes_keys: bool,
    prefix: str = "",
    tenant: str = "",
) -> CIMultiDict[str]:
    """Return the headers of a request for a deployment. Its key replaces that of a tenant.

    prefix: the part of the path that names the model. tenant: the name by which caches are kept apart.
    peer: the client's address. A deployment shows its live view to its own host only, so it must know of other peers.
    """
    dropped = _named(headers.get("Connection", ""))
    passed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        lower = name.lower()
        if lower in HOP or lower in dropped or lower == MODEL or lower == "expect" or lower.startswith(SOCKET):
            continue
        if takes_keys and lower in KEYS and SECRET not in value:
            continue
        passed.add(name, value)
    if takes_keys and replica.key is not None and "Authorization" not in passed:
        passed["Authorization"] = f"Bearer {replica.key}"
    if takes_keys:  # a digest, because deployments elsewhere need not know the name
        passed[CACHE_SCOPE] = hashlib.sha256(tenant.encode()).hexdigest()[:16]
    passed.setdefault(REQUEST_ID, request_id)  # a client's own passes also if it is wrong: the deployment refuses it
    if prefix:
        passed[FORWARDED_PREFIX] = passed.get(FORWARDED_PREFIX, "").rstrip("/") + prefix
    if not is_loopback(peer) or FORWARDED in passed:
        passed[FORWARDED] = ", ".join(filter(None, (passed.get(FORWARDED), peer)))
    return passed


def answer_headers(headers: Iterable[tuple[str, str]], connection: str) -> CIMultiDict[str]:
    """Return the headers of an answer for the client. connection: the value of its Connection header."""
    dropped = _named(connection)
    passed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers:
        lower = name.lower()
        if lower not in HOP and lower not in dropped:
            passed.add(name, value)
    if "Server" not in passed:
        passed["Server"] = "mstar"
    return passed


def _named(connection: str) -> frozenset[str]:
    """Return the header names that a Connection header lists."""
    return frozenset(word.strip().lower() for word in connection.split(",")) if connection else frozenset()


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the key that a request sends, None without one."""
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and value.strip():
        return value.strip()
    protocols = (word.strip() for word in headers.get("Sec-WebSocket-Protocol", "").split(","))
    in_protocol = next((word.removeprefix(KEY_PROTOCOL) for word in protocols if word.startswith(KEY_PROTOCOL)), "")
    return headers.get("X-Api-Key", "").strip() or in_protocol or None


def request_id_of(headers: Mapping[str, str]) -> str:
    """Return the client's id of a request, or a new one: 48 bits of time, so that ids sort by age, 80 random bits."""
    given = headers.get(REQUEST_ID, "")
    if _CLIENT_ID.fullmatch(given):
        return given
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "req-" + "".join([_PAIRS[number >> shift & 1023] for shift in range(120, -1, -10)])


def peer_of(transport: Any) -> str:
    """Return the address of a client; empty if it has gone, or for a Unix socket."""
    name = None if transport is None else transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


def is_loopback(peer: str) -> bool:
    """Return whether an address is one of this host's loopback."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
