"""Synchronous client of one deployment, and its streams.

It drives the coroutines of ApiCalls over a SyncSession, which never suspends, so no event loop exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from mstar_core.client.async_client import ApiCalls
from mstar_core.client.events import Event
from mstar_core.client.media import Media
from mstar_core.client.results import GenerateResult
from mstar_core.client.streams import AsyncEventStream, OnError, StreamFacts
from mstar_core.closing import Closing

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends: one that exchanges through a SyncSession."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a SyncSession does not suspend")


class EventStream(StreamFacts, Closing):
    """Iterator over the events of a request. Leaving its `with` block, or dropping it, closes it.

    A failure raises StreamError after the events before it; with on_error="event" it is the last event instead.
    """

    def __init__(self, events: AsyncEventStream) -> None:
        """events: reads through a SyncSession."""
        self._events = events
        self.reader = events.reader

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            return run(self._events.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def cancel(self) -> bool:
        """Cancel the request by its id; the stream then ends with the error `cancelled`.

        Returns whether the request was still running. Raises ClientError if the server cannot be reached.
        """
        return run(self._events.cancel())

    def close(self) -> None:
        """Close the connection, and cancel the request if it still runs. Safe to call twice."""
        run(self._events.close())


def _blocking(call: Callable[Concatenate[ApiCalls, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the method of MStarClient that runs a call to its end. Signature and documentation are the call's."""

    @functools.wraps(call)
    def method(self: MStarClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(call(self._calls, *args, **kwargs))

    return method


def _over_session(answer: GenerateResult | AsyncEventStream) -> GenerateResult | EventStream:
    return EventStream(answer) if isinstance(answer, AsyncEventStream) else answer


def _streaming(
    call: Callable[Concatenate[ApiCalls, P], Coroutine[Any, Any, GenerateResult | AsyncEventStream]],
) -> Callable[Concatenate[Any, P], GenerateResult | EventStream]:
    """Return the same for a call whose answer may be a stream."""

    @functools.wraps(call)
    def method(self: MStarClient, /, *args: P.args, **kwargs: P.kwargs) -> GenerateResult | EventStream:
        return _over_session(run(call(self._calls, *args, **kwargs)))

    return method


def _described_as(call: Callable[..., Any]) -> Callable[[F], F]:
    """Give a method the signature and documentation of a call."""

    def described(method: F) -> F:
        functools.update_wrapper(method, call)
        return method

    return described


Stream = EventStream
"""Public name of EventStream."""


class MStarClient(Closing):
    """Client of one deployment; threads may share it. Every call raises ClientError on failure.

    timeout: seconds without a byte after which a call fails; also the longest wait for a response to begin.
    session: an httpx.Client or a requests.Session to send through; it stays open. retries: how often to resend a
    request that certainly has not started (no connection, 429, 503), after the delay that the server names.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        timeout: float = 600.0,
        session: Any = None,
        *,
        api_key: str | None = None,
        retries: int = 0,
    ) -> None:
        """The first call connects. Raises TypeError for a session of another kind."""
        from mstar_core.client.http import Http, SyncSession  # here, because httpx is slow to import

        http = Http(SyncSession(session), base_url, timeout_s=timeout, api_key=api_key, retries=retries)
        self._calls = ApiCalls(http)

    @overload
    def generate(
        self,
        *,
        text: str | None = None,
        images: Media | None = None,
        audio: Media | None = None,
        video: Media | None = None,
        output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None,
        stream: Literal[False] = False,
        request_id: str | None = None,
        tensors: Any = None,
        on_error: OnError = "raise",
        reconnect: bool = False,
        **model_kwargs: Any,
    ) -> GenerateResult: ...

    @overload
    def generate(
        self,
        *,
        text: str | None = None,
        images: Media | None = None,
        audio: Media | None = None,
        video: Media | None = None,
        output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None,
        stream: Literal[True],
        request_id: str | None = None,
        tensors: Any = None,
        on_error: OnError = "raise",
        reconnect: bool = False,
        **model_kwargs: Any,
    ) -> EventStream: ...

    @overload
    def generate(
        self,
        *,
        text: str | None = None,
        images: Media | None = None,
        audio: Media | None = None,
        video: Media | None = None,
        output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None,
        stream: bool = False,
        request_id: str | None = None,
        tensors: Any = None,
        on_error: OnError = "raise",
        reconnect: bool = False,
        **model_kwargs: Any,
    ) -> GenerateResult | EventStream: ...

    @_described_as(ApiCalls.generate)
    def generate(self, **kwargs: Any) -> GenerateResult | EventStream:
        return _over_session(run(self._calls.generate(**kwargs)))

    def stream(self, **kwargs: Any) -> EventStream:
        """Return the events of a request as they arrive: `generate(stream=True)`."""
        return EventStream(run(self._calls.stream(**kwargs)))

    chat = _streaming(ApiCalls.chat)
    converse = _blocking(ApiCalls.converse)
    generate_image = _blocking(ApiCalls.generate_image)
    edit_image = _blocking(ApiCalls.edit_image)
    tts = _blocking(ApiCalls.tts)
    transcribe = _blocking(ApiCalls.transcribe)
    act = _blocking(ApiCalls.act)
    encode = _blocking(ApiCalls.encode)
    rollout = _blocking(ApiCalls.rollout)
    plan = _blocking(ApiCalls.plan)
    cancel = _blocking(ApiCalls.cancel)
    health = _blocking(ApiCalls.health)
    ready = _blocking(ApiCalls.ready)
    models = _blocking(ApiCalls.models)
    samples = _blocking(ApiCalls.samples)

    def close(self) -> None:
        """Close the connections of this client. Safe to call twice."""
        run(self._calls.close())
