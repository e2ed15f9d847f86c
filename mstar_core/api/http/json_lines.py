"""Body of JSON lines that arrives while its response is sent. Used by routes that take text as it is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from mstar_core.api.errors import SlowUpload
from mstar_core.api.http.body import ByteStream
from mstar_core.api.http.strict_json import parse_object
from mstar_core.errors import TooLarge

NDJSON: Final = "application/x-ndjson"
LINE_BYTES: Final = 64 * 1024
IDLE_S: Final = 60.0
"""Longest time without a byte. A client that waits for its text sends empty lines."""


async def json_lines(stream: ByteStream, limit: int, *, idle_s: float = IDLE_S) -> AsyncIterator[dict[str, Any]]:
    """Yield the object of each line when it is complete. Empty lines have no object.

    Raises RequestError for a line that is not an object, TooLarge for a line above `LINE_BYTES` or a body above `limit`
    bytes, SlowUpload after `idle_s` without a byte.
    """
    number, total, rest = 0, 0, b""
    while (piece := await _read(stream, idle_s)) is not None:
        total += len(piece)
        if total > limit:
            raise TooLarge(f"the body is larger than {limit} bytes", code="body_too_large")
        *lines, rest = (rest + piece).split(b"\n")
        for line in (*lines, rest):
            if len(line) > LINE_BYTES:
                raise TooLarge(
                    f"line {number + 1} is longer than {LINE_BYTES} bytes",
                    hint="send the text in several lines",
                    code="body_too_large",
                )
        for line in lines:
            number += 1
            if line.strip():
                yield parse_object(line, f"line {number}")
    if rest.strip():
        yield parse_object(rest, f"line {number + 1}")


async def _read(stream: ByteStream, idle_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(idle_s):
            return await stream.read()
    except TimeoutError:
        raise SlowUpload(
            f"no byte of the body arrived within {idle_s:g} s",
            hint="send empty lines while there is no text, or end the body",
        ) from None
