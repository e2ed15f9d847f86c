"""Server-sent events: encoding, and error events of failed streams. Used by the OpenAI routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def streaming(exchange: Exchange, last: Callable[[MstarError], bytes] | None = None) -> AsyncIterator[None]:
    """End the streamed body that the block writes. If it fails after its start, send `last`, by default an error event.

    A client that does not read gets no error; its connection is aborted.
    """
    try:
        yield
    except MstarError as error:
        if exchange.has_begun and error.code == "stalled":
            exchange.abort(drops=True)
        elif exchange.has_begun:
            data = last(error) if last is not None else event(reply_of(error, exchange.request_id).body)
            await exchange.write(data, "")
            await exchange.end()
        raise
    await exchange.end()
