"""Events of one request as they arrive. Closing or dropping a stream cancels the request.

Made by AsyncMStarClient; the synchronous EventStream drives one of these without an event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from mstar_core.client.calls import cancel_call, events_call
from mstar_core.client.errors import ClientError, StreamError, like_requests
from mstar_core.client.events import ErrorEvent, Event
from mstar_core.client.reader import StreamReader

if TYPE_CHECKING:
    import httpx

    from mstar_core.client.http import Http

OnError = Literal["raise", "event"]
RECONNECT_S: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0)
"""Delays before the attempts to reconnect a stream."""


class StreamFacts:
    """Facts of a request, updated while its stream is read."""

    reader: StreamReader

    @property
    def request_id(self) -> str | None:
        """The request's id, known before the first event."""
        return self.reader.request_id

    @property
    def seed(self) -> int | None:
        """The seed in use."""
        return self.reader.seed

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` after a successful end; None before it and for a failed stream."""
        return self.reader.finish_reason

    @property
    def usage(self) -> dict[str, Any] | None:
        """The resources that the request used; None before its end."""
        return self.reader.usage

    @property
    def warnings(self) -> list[str]:
        """The server's warnings; empty before the end."""
        return self.reader.warnings


class AsyncEventStream(StreamFacts):
    """Asynchronous iterator over the events of a request. Leaving its `async with` block, or dropping it, closes it.

    A failure raises StreamError after the events before it; with on_error="event" it is the last event instead.
    """

    def __init__(self, http: Http, response: httpx.Response, on_error: OnError, *, reconnects: bool = False) -> None:
        """reconnects: the request goes on without its connection, so the stream opens another one if it breaks."""
        self._http = http
        self._response = response
        self._body = http.session.body(response)
        self._on_error = on_error
        self._reconnects = reconnects
        self.reader = StreamReader(response.headers.get("X-Request-ID"), response.headers.get("Content-Type") or "")
        self._ready: list[Event] = []
        self._has_ended = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while not self._ready and not self._has_ended:
            self._ready += await self._read()
        if not self._ready:
            raise StopAsyncIteration
        event = self._ready.pop(0)
        if isinstance(event, ErrorEvent) and self._on_error == "raise":
            await self.close()
            raise error_of_event(event)
        return event

    async def cancel(self) -> bool:
        """Cancel the request by its id; the stream then ends with the error `cancelled`.

        Returns whether the request was still running. Raises ClientError if the server cannot be reached.
        """
        if self.request_id is None:
            return False
        is_cancelled: bool = (await self._http.fetch(cancel_call(self.request_id))).json()["status"] == "cancelled"
        return is_cancelled

    async def close(self) -> None:
        """Close the connection, and cancel the request if it still runs. Safe to call twice."""
        if self._reconnects and not self._has_ended and not self.reader.is_over:
            with suppress(ClientError):  # otherwise the request ends at its deadline
                await self.cancel()
        self._has_ended = True
        self._ready.clear()
        await self._http.session.close_response(self._response)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit, modules that this needs may be gone
            self._http.session.drop(self._response)

    async def _read(self) -> list[Event]:
        """Return the events of the next bytes. At the end of the body the connection returns to its pool."""
        data, why = None, ""
        try:
            data = await self._http.next_chunk(self._body)
        except ClientError as error:
            why = str(error)
        if data is not None:
            return self.reader.push(data)
        if self._reconnects and not self.reader.is_over:
            refusal = await self._reconnect()
            if not refusal:
                return []
            why = f"{why}; {refusal}" if why else refusal
        events = self.reader.end(why)
        await self.close()
        return events

    async def _reconnect(self) -> str:
        """Open a response with the events that are missing. Returns why there is none, empty if it is open."""
        refusal = "the response names no request id"
        await self._http.session.close_response(self._response)
        for delay_s in RECONNECT_S if self.request_id is not None else ():
            await self._http.session.sleep(delay_s)
            try:
                self._response = await self._http.open(events_call(self.request_id or "", self.reader.count))
            except ClientError as error:
                refusal = str(error)
                if error.response is not None and error.status < 500 and error.status != 429:
                    return refusal
            else:
                self._body = self._http.session.body(self._response)
                self.reader.resume(self._response.headers.get("Content-Type") or "")
                return ""
        return refusal


AsyncStream = AsyncEventStream
"""Public name of AsyncEventStream."""


def error_of_event(event: ErrorEvent) -> ClientError:
    """Return the exception for an error event."""
    detail = f"request {event.request_id}" if event.request_id else ""
    return like_requests(StreamError, "HTTPError")(
        event.message or "the request failed",
        detail,
        status=event.status,
        code=event.code,
        param=event.param,
        request_id=event.request_id,
    )
