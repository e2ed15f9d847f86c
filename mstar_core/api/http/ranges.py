"""Byte ranges of files that are sent: one range per request. Source: RFC 9110, section 14."""

from __future__ import annotations

import re
from typing import Final

from mstar_core.api.errors import RangeNotSatisfiable

_RANGE: Final = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.ASCII)


def asked_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return first byte and end of the range that a `Range` header asks for; None for the whole file.

    size: bytes of the file. Other units, several ranges and what is not a range are ignored, as the RFC allows. Raises
    RangeNotSatisfiable if the file has none of the bytes.
    """
    match = _RANGE.fullmatch(header or "")
    if match is None or not (match[1] or match[2]):
        return None
    if match[1] and match[2] and int(match[2]) < int(match[1]):
        return None
    start = int(match[1]) if match[1] else max(0, size - int(match[2]))
    stop = min(size, int(match[2]) + 1) if match[1] and match[2] else size
    if start >= stop:
        raise RangeNotSatisfiable(f"the file has {size} bytes", hint=f"ask for bytes below {size}", size=size)
    return start, stop
