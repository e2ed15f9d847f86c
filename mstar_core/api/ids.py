"""Names and numbers of requests: the client's id, its trace, our handle, the seed. Used by routes and registry."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
import urllib.parse
from typing import Any, Final

from mstar_core.errors import RequestError

HANDLE_BITS: Final = 40
"""Handles of one incarnation of the api; the incarnation stands above them, so none is ever used twice."""

MAX_SEED: Final = 2**63 - 1
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_CLIENT_ID: Final = re.compile(r"[\x21-\x2e\x30-\x7e]{1,128}")  # printable ASCII without space and slash


def make_handle(incarnation: int, number: int) -> int:
    """The handle of the `number`-th request of this life."""
    return (incarnation << HANDLE_BITS) | number


def new_request_id() -> str:
    """`req-` and 26 characters: 48 bits of time, so that ids sort by age, then 80 random bits."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "req-" + "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def check_request_id(value: str, field: str = "request_id") -> str:
    """The client's own id. Raises RequestError when it cannot be one."""
    if _CLIENT_ID.fullmatch(value) is None:
        allowed = "1 to 128 printable ASCII characters without space and '/'"
        raise RequestError(f"{field} is not usable as an id", hint=f"send {allowed}", field=field, allowed=allowed)
    return value


def trace_id_of(parent: str | None) -> str:
    """The trace that the header `traceparent` names (W3C Trace Context), a new one where it names none."""
    found = _PARENT.fullmatch(parent or "")
    return found[1] if found is not None else secrets.token_hex(16)


def unescaped(name: str) -> str:
    """A name out of a path, its percent escapes undone: clients escape what may well stand in an id."""
    return urllib.parse.unquote(name)


def seed_of(request_id: str) -> int:
    """The seed of a request that names none: stable for its id."""
    digest = hashlib.md5(request_id.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "little")


def check_seed(value: Any) -> int:
    """Read a seed, also as text. Raises RequestError outside 0 to 2^63-1."""
    number = _whole(value)
    if number is None or not 0 <= number <= MAX_SEED:
        allowed = "an integer from 0 to 2^63-1"
        raise RequestError(f"seed is not {allowed}", field="seed", allowed=allowed)
    return number


def _whole(value: Any) -> int | None:
    if isinstance(value, str):
        text = value.strip()
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 32 else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
