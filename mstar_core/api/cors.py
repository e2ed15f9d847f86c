"""Which browsers may call: origins that the operator named, and no others. Used by every answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

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
