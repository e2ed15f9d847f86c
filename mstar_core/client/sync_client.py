"""Synchronous client of one deployment, and its streams.

It drives the coroutines of ApiCalls over a SyncSession, which never suspends, so no event loop exists.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from mstar_core.client.async_client import ApiCalls
from mstar_core.client.audio import AudioBuffer
from mstar_core.client.events import ActionChunk, Event
from mstar_core.client.media import Media
from mstar_core.client.results import GenerateResult, LatentResult, ModelInfo
from mstar_core.client.streams import AsyncEventStream, OnError, StreamFacts

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends: one that exchanges through a SyncSession."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a SyncSession does not suspend")


class EventStream(StreamFacts):
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
        """Close the connection, which cancels a running request. Safe to call twice."""
        run(self._events.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


Stream = EventStream
"""Public name of EventStream."""


class MStarClient:
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
        self, *, text: str | None = None, images: Media | None = None, audio: Media | None = None,
        video: Media | None = None, output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None, stream: Literal[False] = False,
        request_id: str | None = None, tensors: Any = None, on_error: OnError = "raise", **model_kwargs: Any,
    ) -> GenerateResult: ...  # fmt: skip

    @overload
    def generate(
        self, *, text: str | None = None, images: Media | None = None, audio: Media | None = None,
        video: Media | None = None, output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None, stream: Literal[True],
        request_id: str | None = None, tensors: Any = None, on_error: OnError = "raise", **model_kwargs: Any,
    ) -> EventStream: ...  # fmt: skip

    @overload
    def generate(
        self, *, text: str | None = None, images: Media | None = None, audio: Media | None = None,
        video: Media | None = None, output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None, stream: bool = False,
        request_id: str | None = None, tensors: Any = None, on_error: OnError = "raise", **model_kwargs: Any,
    ) -> GenerateResult | EventStream: ...  # fmt: skip

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
        **model_kwargs: Any,
    ) -> GenerateResult | EventStream:
        """Send one request of any kind. model_kwargs are the model's parameters; those that are None are omitted.

        images, audio, video: a path, bytes, (name, bytes), or a list. tensors: the same for npy and safetensors files,
        or arrays. input_modalities: the order in which the model reads its inputs, if not images, audio, video,
        tensors, text. on_error: how a stream reports a failure.
        """
        made = run(
            self._calls.generate(
                text=text, images=images, audio=audio, video=video, output_modalities=output_modalities,
                input_modalities=input_modalities, stream=stream, request_id=request_id, tensors=tensors,
                on_error=on_error, **model_kwargs,
            )
        )  # fmt: skip
        return EventStream(made) if isinstance(made, AsyncEventStream) else made

    def stream(self, **kwargs: Any) -> EventStream:
        """Return the events of a request as they arrive: `generate(stream=True)`."""
        return EventStream(run(self._calls.stream(**kwargs)))

    def chat(
        self,
        prompt: str,
        *,
        images: Media | None = None,
        audio: Media | None = None,
        output_modalities: Sequence[str] | str = ("text",),
        stream: bool = False,
        **model_kwargs: Any,
    ) -> GenerateResult | EventStream:
        """Answer a prompt, with optional images or audio."""
        return self.generate(
            text=prompt, images=images, audio=audio, output_modalities=output_modalities, stream=stream, **model_kwargs
        )

    def generate_image(self, prompt: str, **model_kwargs: Any) -> bytes:
        """Generate an image from a prompt. Returns a PNG file."""
        return run(self._calls.generate_image(prompt, **model_kwargs))

    def edit_image(self, prompt: str, image: Media, **model_kwargs: Any) -> bytes:
        """Edit an image as the prompt says. Returns a PNG file."""
        return run(self._calls.edit_image(prompt, image, **model_kwargs))

    def tts(self, text: str, *, voice: str | None = None, **model_kwargs: Any) -> AudioBuffer:
        """Speak a text."""
        return run(self._calls.tts(text, voice=voice, **model_kwargs))

    def transcribe(self, audio: Media, **params: Any) -> str:
        """Transcribe speech. params: fields of /v1/audio/transcriptions, such as `language`."""
        return run(self._calls.transcribe(audio, **params))

    def act(self, images: Media, text: str | None, robot_state: Any, **model_kwargs: Any) -> ActionChunk:
        """Return a robot's next actions. images: its cameras, in the model's order. robot_state: joint values."""
        return run(self._calls.act(images, text, robot_state, **model_kwargs))

    def encode(self, video: Any, **model_kwargs: Any) -> LatentResult:
        """Return the features of a clip. video: a file, frames as files, or an array of pixels."""
        return run(self._calls.encode(video, **model_kwargs))

    def rollout(
        self, video: Any, actions: Any = None, states: Any = None, *, goal: Any = None, **model_kwargs: Any
    ) -> LatentResult:
        """Predict the continuation of a clip under given actions. goal: an image or array that scores the outcomes."""
        return run(self._calls.rollout(video, actions, states, goal=goal, **model_kwargs))

    def plan(self, image: Any, goal: Any, state: Any, **model_kwargs: Any) -> LatentResult:
        """Plan actions that lead from `image` to `goal`. state: the robot's state, seven numbers."""
        return run(self._calls.plan(image, goal, state, **model_kwargs))

    def cancel(self, request_id: str) -> bool:
        """Cancel a request. Returns False if it has ended, or if the server does not know the id."""
        return run(self._calls.cancel(request_id))

    def health(self) -> bool:
        """Return whether every process of the deployment is alive and its start is complete."""
        return run(self._calls.health())

    def ready(self) -> bool:
        """Return whether the deployment accepts a request now."""
        return run(self._calls.ready())

    def models(self) -> list[ModelInfo]:
        """Return the models that the deployment serves."""
        return run(self._calls.models())

    def close(self) -> None:
        """Close the connections of this client. Safe to call twice."""
        run(self._calls.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
