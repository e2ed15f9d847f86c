"""API keys: who may call, and whose a request is. Used by the app before every route that is not open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from mstar_core.api.errors import Unauthorized


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
