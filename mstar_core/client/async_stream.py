"""AsyncStream: the events of one request as they arrive, on an event loop. Made by AsyncMStarClient."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mstar_core.client.call import cancel_call
from mstar_core.client.event import ErrorEvent, Event
from mstar_core.client.failure import MStarError
from mstar_core.client.reader import StreamReader
from mstar_core.client.stream import OnError, StreamFacts, failure_of_event

if TYPE_CHECKING:
    import httpx

    from mstar_core.client.async_http import AsyncHttp


class AsyncStream(StreamFacts):
    """Iterates over the events of a request. Leaving its `async with` block, or dropping it, closes it.

    A failure raises StreamError after the events before it; with on_error="event" it is the last event instead.
    """

    def __init__(self, http: AsyncHttp, response: httpx.Response, on_error: OnError) -> None:
        self._http = http
        self._response = response
        self._body = http.chunks(response)
        self._on_error = on_error
        self._reader = StreamReader(response.headers.get("X-Request-ID"), response.headers.get("Content-Type") or "")
        self._ready: list[Event] = []
        self._has_ended = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._ready and not self._has_ended:
            self._ready += await self._more()
        if not self._ready:
            raise StopAsyncIteration
        event = self._ready.pop(0)
        if isinstance(event, ErrorEvent) and self._on_error == "raise":
            await self.close()
            raise failure_of_event(event)
        return event

    async def cancel(self) -> bool:
        """Cancel the request by its id; the events that follow end with the error `cancelled`.

        Returns whether there was something to cancel. Raises MStarError when the server cannot be asked.
        """
        if self.request_id is None:
            return False
        found: bool = (await self._http.fetch(cancel_call(self.request_id))).json()["status"] == "cancelled"
        return found

    async def close(self) -> None:
        """Close the connection, which cancels a request that still runs. Safe to call twice."""
        self._has_ended = True
        self._ready.clear()
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process what it needs may be gone already
            if not self._response.is_closed:
                self._http.drop(self._response)

    async def _more(self) -> list[Event]:
        """Read on. At the end of the body the connection goes back to where it came from."""
        try:
            data = await anext(self._body, None)
        except MStarError as error:
            events = self._reader.end(str(error))
            data = None
        else:
            events = self._reader.end() if data is None else self._reader.push(data)
        if data is None:
            await self.close()
        return events
