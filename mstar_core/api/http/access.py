"""Access rules: API keys, browser origins and host names, checked before a route; CORS headers of every response."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from mstar_core.api.errors import Forbidden, Unauthorized
from mstar_core.config.resolved import ApiConfig

METHODS: Final = "GET, POST, DELETE, OPTIONS"
EXPOSED: Final = "X-Request-ID, X-Trace-ID, X-Mstar-Warnings, X-Sample-Rate, Retry-After, Location"
ASKABLE: Final = (
    "Authorization, Content-Type, X-Request-ID, X-Request-Timeout, X-Period-Ms, X-Skipped-Ticks, X-Mstar-Detach, "
    "Last-Event-ID, traceparent"
)
MAX_AGE_S: Final = 600
SAFE: Final = ("GET", "HEAD", "OPTIONS")
OWN_SITES: Final = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests of the deployment's own page, and of a user. Source: W3C Fetch Metadata."""


def cors_headers(allowed: Sequence[str], origin: str | None) -> dict[str, str]:
    """Return the CORS headers of a response to `origin`; none without --cors-origin.

    Credentials (cookies) are never allowed, so `*` exposes only what any client can read.
    """
    if not allowed:
        return {}
    if origin is None or not is_plain(origin) or (origin not in allowed and "*" not in allowed):
        return {"Vary": "Origin"}
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}


def is_plain(text: str) -> bool:
    """Return whether a client header may be echoed: printable ASCII only."""
    return text.isascii() and text.isprintable()


def preflight_headers(requested: str | None) -> dict[str, str]:
    """Return the headers of a preflight response. wanted: request headers that the browser asks for."""
    return {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": requested if requested and is_plain(requested) else ASKABLE,
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }


def check_key(keys: Sequence[str], headers: Mapping[str, str]) -> str:
    """Return a digest of the API key of a request, or "" if no keys are configured. Raises Unauthorized.

    Compares every known key in constant time, so that timing reveals nothing.
    """
    if not keys:
        return ""
    key_sent = key_of(headers).encode(errors="surrogateescape")  # undecodable bytes are a wrong key
    matches = [hmac.compare_digest(key_sent, key.encode()) for key in keys]
    if not key_sent or not any(matches):
        raise Unauthorized("the API key is missing or wrong", hint="send it as 'Authorization: Bearer KEY'")
    return hashlib.sha256(key_sent).hexdigest()


def check_metrics_key(api: ApiConfig, headers: Mapping[str, str]) -> None:
    """Check the key of a request for /metrics: one of the metrics keys, or of the API keys. Raises Unauthorized."""
    if not api.metrics_open and (api.api_keys or api.metrics_keys):
        check_key((*api.metrics_keys, *api.api_keys), headers)


def key_of(headers: Mapping[str, str]) -> str:
    """Return the key that a request sends, empty without one."""
    scheme, _, value = (headers.get("authorization") or "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and value.strip():
        return value.strip()
    return (headers.get("x-api-key") or "").strip()


def check_browser(api: ApiConfig, method: str, headers: Mapping[str, str]) -> None:
    """Refuse requests that a foreign web page makes a browser send to a deployment without API keys. Raises Forbidden.

    Clients other than browsers send neither an Origin nor Sec-Fetch-Site, and name the host that they connect to.
    """
    if api.api_keys:
        return  # a foreign page does not know a key
    origin, allowed = headers.get("origin"), api.cors_origins
    name = host_name(headers.get("host") or "")
    if is_local_name(host_name(api.host, has_port=False)) and name and not _is_own(name, allowed):
        raise Forbidden(
            "this host name is not served",  # a page whose name resolves to this host (DNS rebinding)
            hint="use http://localhost, allow the name with --cors-origin, or set an API key",
            code="host_not_allowed",
        )
    if method in SAFE or (origin is not None and (origin in allowed or "*" in allowed)):
        return
    site = headers.get("sec-fetch-site")
    is_own = site in OWN_SITES if site is not None else origin is None or is_same_origin(origin, headers)
    if not is_own:
        raise Forbidden("web pages of other origins may not send this", hint="allow them with --cors-origin")


def is_same_origin(origin: str, headers: Mapping[str, str]) -> bool:
    """Return whether an origin is that of the deployment's own pages: the host that the request names."""
    return origin.partition("://")[2].lower() == (headers.get("host") or "").lower()


def _is_own(name: str, origins: Sequence[str]) -> bool:
    if is_local_name(name) or "*" in origins:
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
        return True  # DNS cannot point an address elsewhere
    except ValueError:
        return name in [host_name(origin.partition("://")[2]) for origin in origins]


@lru_cache(maxsize=64)
def is_local_name(name: str) -> bool:
    """Return whether a host name always means this host. Source: RFC 6761."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str, *, has_port: bool = True) -> str:
    """Return the name in a Host header or an address, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host.partition(":")[0] if has_port else host).lower()
