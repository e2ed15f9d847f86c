"""Stream: the events of one request as they arrive. Made by MStarClient; closing or dropping it cancels the request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from mstar_core.client.call import cancel_call
from mstar_core.client.event import ErrorEvent, Event
from mstar_core.client.failure import MStarError, StreamError, like_requests
from mstar_core.client.reader import StreamReader

if TYPE_CHECKING:
    import httpx

    from mstar_core.client.http import Http

OnError = Literal["raise", "event"]


class StreamFacts:
    """What a stream knows of its request. Held up to date by the stream that is read."""

    _reader: StreamReader

    @property
    def request_id(self) -> str | None:
        """The request's id, known before the first event."""
        return self._reader.request_id

    @property
    def seed(self) -> int | None:
        """The seed in use."""
        return self._reader.seed

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length` once the stream has ended well, None before that and for one that failed."""
        return self._reader.finish_reason

    @property
    def usage(self) -> dict[str, Any] | None:
        """What the request took; None before its end."""
        return self._reader.usage

    @property
    def warnings(self) -> list[str]:
        """What the server had to say; empty before the end."""
        return self._reader.warnings


class Stream(StreamFacts):
    """Iterates over the events of a request. Leaving its `with` block closes it.

    A failure raises StreamError after the events before it; with on_error="event" it is the last event instead.
    """

    def __init__(self, http: Http, response: httpx.Response, on_error: OnError) -> None:
        self._http = http
        self._response = response
        self._body = http.chunks(response)
        self._on_error = on_error
        self._reader = StreamReader(response.headers.get("X-Request-ID"), response.headers.get("Content-Type") or "")
        self._ready: list[Event] = []
        self._has_ended = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while not self._ready and not self._has_ended:
            self._ready += self._more()
        if not self._ready:
            raise StopIteration
        event = self._ready.pop(0)
        if isinstance(event, ErrorEvent) and self._on_error == "raise":
            self.close()
            raise failure_of_event(event)
        return event

    def cancel(self) -> bool:
        """Cancel the request by its id; the events that follow end with the error `cancelled`.

        Returns whether there was something to cancel. Raises MStarError when the server cannot be asked.
        """
        if self.request_id is None:
            return False
        found: bool = self._http.fetch(cancel_call(self.request_id)).json()["status"] == "cancelled"
        return found

    def close(self) -> None:
        """Close the connection, which cancels a request that still runs. Safe to call twice."""
        self._has_ended = True
        self._ready.clear()
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of the process what it needs may be gone already
            self.close()

    def _more(self) -> list[Event]:
        """Read on. At the end of the body the connection goes back to where it came from."""
        try:
            data = next(self._body, None)
        except MStarError as error:
            events = self._reader.end(str(error))
            data = None
        else:
            events = self._reader.end() if data is None else self._reader.push(data)
        if data is None:
            self.close()
        return events


def failure_of_event(event: ErrorEvent) -> MStarError:
    """The exception for an error event."""
    detail = f"request {event.request_id}" if event.request_id else ""
    return like_requests(StreamError, "HTTPError")(
        event.message or "the request failed", detail, status=event.status, code=event.code, param=event.param,
        request_id=event.request_id,
    )  # fmt: skip
