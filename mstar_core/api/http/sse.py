"""Server-sent events: encoding, and error events of failed streams. Used by the OpenAI routes."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from mstar_core.api.errors import reply_of
from mstar_core.api.http.exchange import Exchange
from mstar_core.errors import MstarError

EVENTS: Final = "text/event-stream; charset=utf-8"
PING: Final = b": ping\n\n"
"""Comment that keeps the connection alive while there is no output."""

DONE: Final = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """Encode an event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def fail_events(exchange: Exchange, error: MstarError) -> None:
    """Send the error event of a started stream, and end the body."""
    await fail_stream(exchange, event(reply_of(error, exchange.request_id).body), error)


async def fail_stream(exchange: Exchange, last: bytes, error: MstarError) -> None:
    """Send `last`, the error line or event of a started stream, and end the body."""
    if error.code == "stalled":
        exchange.abort(drops=True)
        return
    await exchange.write(last, "")
    await exchange.end()
