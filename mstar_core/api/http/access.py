"""Access rules: API keys and CORS origins. Checked before every route that is not open; CORS headers go on every
response.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from mstar_core.api.errors import Unauthorized

METHODS: Final = "GET, POST, OPTIONS"
EXPOSED: Final = "X-Request-ID, X-Trace-ID, X-Mstar-Warnings, X-Sample-Rate, Retry-After"
ASKABLE: Final = (
    "Authorization, Content-Type, X-Request-ID, X-Request-Timeout, X-Period-Ms, X-Skipped-Ticks, traceparent"
)
MAX_AGE_S: Final = 600


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


def preflight_headers(wanted: str | None) -> dict[str, str]:
    """Return the headers of a preflight response. wanted: request headers that the browser asks for."""
    return {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": wanted if wanted and is_plain(wanted) else ASKABLE,
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }


def check_key(keys: Sequence[str], headers: Mapping[str, str]) -> str:
    """Return a digest of the API key of a request, or "" if no keys are configured. Raises Unauthorized.

    Compares every known key in constant time, so that timing reveals nothing.
    """
    if not keys:
        return ""
    given = _given(headers).encode(errors="surrogateescape")  # undecodable bytes are a wrong key
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if not given or not any(matches):
        raise Unauthorized("the API key is missing or wrong", hint="send it as 'Authorization: Bearer KEY'")
    return hashlib.sha256(given).hexdigest()


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, value = (headers.get("authorization") or "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and value.strip():
        return value.strip()
    return (headers.get("x-api-key") or "").strip()
