"""Which browsers may call: origins that the operator named, and no others. Used by every answer."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

from mstar_core.api.errors import Unauthorized

METHODS: Final = "GET, POST, OPTIONS"
EXPOSED: Final = "X-Request-ID, X-Trace-ID, X-Mstar-Warnings, X-Sample-Rate, Retry-After"
ASKABLE: Final = "Authorization, Content-Type, X-Request-ID, X-Request-Timeout, traceparent"
MAX_AGE_S: Final = 600


def cors_headers(allowed: Sequence[str], origin: str | None) -> dict[str, str]:
    """What an answer says to the browser of `origin`; nothing without --cors-origin.

    Credentials of the browser (cookies) are never allowed, so that `*` gives away nothing but what anyone may have.
    """
    if not allowed:
        return {}
    if origin is None or not is_plain(origin) or (origin not in allowed and "*" not in allowed):
        return {"Vary": "Origin"}
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED, "Vary": "Origin"}


def is_plain(text: str) -> bool:
    """Whether a header of the client may be sent back: printable ASCII alone."""
    return text.isascii() and text.isprintable()


def preflight_headers(wanted: str | None) -> dict[str, str]:
    """What a browser asks before it sends a request. wanted: the headers that it would send."""
    return {
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Allow-Headers": wanted if wanted and is_plain(wanted) else ASKABLE,
        "Access-Control-Max-Age": str(MAX_AGE_S),
    }


def check_key(keys: Sequence[str], headers: Mapping[str, str]) -> str:
    """A digest of the key that came with the request, "" when none is needed. Raises Unauthorized.

    Every known key is compared, each in constant time, so that the time tells nothing.
    """
    if not keys:
        return ""
    given = _given(headers).encode(errors="surrogateescape")  # bytes that are no text are a wrong key
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if not given or not any(matches):
        raise Unauthorized("the API key is missing or wrong", hint="send it as 'Authorization: Bearer KEY'")
    return hashlib.sha256(given).hexdigest()


def _given(headers: Mapping[str, str]) -> str:
    scheme, _, value = (headers.get("authorization") or "").partition(" ")
    if scheme.lower() in ("bearer", "api-key") and value.strip():
        return value.strip()
    return (headers.get("x-api-key") or "").strip()
