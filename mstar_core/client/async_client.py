"""Calls of a deployment's API, and AsyncMStarClient, which makes them on an event loop.

Every call is written here once, as a coroutine; MStarClient drives the same coroutines without a loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from mstar_core.client.audio import AudioBuffer
from mstar_core.client.calls import HttpCall, cancel_call, generate_call, get_call, transcribe_call
from mstar_core.client.chat import ChatResult, chat_fields, chat_result_of
from mstar_core.client.errors import ClientError
from mstar_core.client.events import ActionChunk
from mstar_core.client.media import Media
from mstar_core.client.results import (
    GenerateResult,
    LatentResult,
    ModelInfo,
    ModelSample,
    actions_of,
    audio_of,
    image_of,
    json_object,
    latents_of,
    models_of,
    result_of,
    samples_of,
)
from mstar_core.client.streams import AsyncEventStream, OnError

if TYPE_CHECKING:
    from mstar_core.client.http import Http


class ApiCalls:
    """Every call of the API. Owned by a client, which owns the connection. Every call raises ClientError on failure."""

    def __init__(self, http: Http) -> None:
        self._http = http

    @overload
    async def generate(
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
    async def generate(
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
    ) -> AsyncEventStream: ...

    @overload
    async def generate(
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
    ) -> GenerateResult | AsyncEventStream: ...

    async def generate(
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
    ) -> GenerateResult | AsyncEventStream:
        """Send one request of any kind. model_kwargs are the model's parameters; those that are None are omitted.

        images, audio, video: a path, bytes, (name, bytes), or a list. tensors: the same for npy and safetensors files,
        or arrays. input_modalities: the order in which the model reads its inputs, if not images, audio, video,
        tensors, text. on_error: how a stream reports a failure. reconnect: a stream whose connection breaks opens
        another one and goes on, without repeating or losing an event; until then the request runs without it.
        """
        if on_error not in ("raise", "event"):
            raise ValueError(f'on_error must be "raise" or "event", not {on_error!r}')
        if reconnect and not stream:
            raise ValueError("reconnect needs stream=True")
        make = partial(
            generate_call,
            text=text,
            images=images,
            audio=audio,
            video=video,
            output_modalities=output_modalities,
            input_modalities=input_modalities,
            stream=stream,
            request_id=request_id,
            tensors=tensors,
            model_kwargs=model_kwargs,
            reconnect=reconnect,
        )
        has_media = any(media is not None for media in (images, audio, video, tensors))
        call = await self._http.session.call_in_thread(make) if has_media else make()
        if stream:
            return AsyncEventStream(self._http, await self._http.open(call), on_error, reconnects=reconnect)
        return result_of(await self._http.fetch(call))

    async def stream(self, **kwargs: Any) -> AsyncEventStream:
        """Return the events of a request as they arrive: `generate(stream=True)`."""
        opened: AsyncEventStream = await self.generate(stream=True, **kwargs)
        return opened

    async def chat(
        self,
        /,
        prompt: str,
        *,
        images: Media | None = None,
        audio: Media | None = None,
        video: Media | None = None,
        output_modalities: Sequence[str] | str = ("text",),
        stream: bool = False,
        **model_kwargs: Any,
    ) -> GenerateResult | AsyncEventStream:
        """Answer a prompt, with optional images, audio or video before it."""
        return await self.generate(
            text=prompt,
            images=images,
            audio=audio,
            video=video,
            output_modalities=output_modalities,
            stream=stream,
            **model_kwargs,
        )

    async def converse(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **params: Any,
    ) -> ChatResult:
        """Answer a conversation. messages: as the chat route has them. tools: functions that the answer may call, each
        with `name`, `description` and `parameters`. params: other fields of the route and parameters of the model.
        """
        fields = chat_fields(messages, tools, params)
        return chat_result_of(await self._json(HttpCall(method="POST", path="/v1/chat/completions", body=fields)))

    async def generate_image(self, /, prompt: str, **model_kwargs: Any) -> bytes:
        """Generate an image from a prompt. Returns a PNG file."""
        return image_of(await self._whole(model_kwargs, text=prompt, output_modalities=("image",)))

    async def edit_image(self, /, prompt: str, image: Media, **model_kwargs: Any) -> bytes:
        """Edit an image as the prompt says. Returns a PNG file."""
        return image_of(await self._whole(model_kwargs, text=prompt, images=image, output_modalities=("image",)))

    async def tts(self, /, text: str, *, voice: str | None = None, **model_kwargs: Any) -> AudioBuffer:
        """Speak a text."""
        return audio_of(await self._whole(model_kwargs, text=text, voice=voice, output_modalities=("audio",)))

    async def transcribe(self, /, audio: Media, **params: Any) -> str:
        """Transcribe speech. params: fields of /v1/audio/transcriptions, such as `language`."""
        call = await self._http.session.call_in_thread(partial(transcribe_call, audio, params))
        return str((await self._json(call))["text"])

    async def act(self, /, images: Media, text: str | None, robot_state: Any, **model_kwargs: Any) -> ActionChunk:
        """Return a robot's next actions. images: its cameras, in the model's order. robot_state: joint values."""
        return actions_of(
            await self._whole(
                model_kwargs, images=images, text=text, robot_state=robot_state, output_modalities=("action",)
            )
        )

    async def encode(self, /, video: Any, **model_kwargs: Any) -> LatentResult:
        """Return the features of a clip. video: a file, frames as files, or an array of pixels."""
        return latents_of(
            await self._whole(model_kwargs, **_frames(video), task="encode", output_modalities=("tensor",))
        )

    async def rollout(
        self, /, video: Any, actions: Any = None, states: Any = None, *, goal: Any = None, **model_kwargs: Any
    ) -> LatentResult:
        """Predict the continuation of a clip under given actions. goal: an image or array that scores the outcomes."""
        return latents_of(
            await self._whole(
                model_kwargs,
                **_frames(video, goal),
                task="rollout",
                actions=actions,
                states=states,
                output_modalities=("tensor", "scalar"),
            )
        )

    async def plan(self, /, image: Any, goal: Any, state: Any, **model_kwargs: Any) -> LatentResult:
        """Plan actions that lead from `image` to `goal`. state: the robot's state, seven numbers."""
        return latents_of(
            await self._whole(
                model_kwargs,
                **_frames(image, goal),
                task="plan",
                states=[state],
                output_modalities=("tensor", "scalar"),
            )
        )

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request. Returns False if it has ended, or if the server does not know the id."""
        try:
            return bool((await self._json(cancel_call(request_id)))["status"] == "cancelled")
        except ClientError as error:
            if error.status == 404:
                return False
            raise

    async def health(self) -> bool:
        """Return whether every process of the deployment is alive and its start is complete."""
        return await self._has_status("/health", "healthy")

    async def ready(self) -> bool:
        """Return whether the deployment accepts a request now."""
        return await self._has_status("/ready", "ready")

    async def models(self) -> list[ModelInfo]:
        """Return the models that the deployment serves."""
        return models_of(await self._json(get_call("/v1/models")))

    async def samples(self) -> list[ModelSample]:
        """Return inputs that fit the served model; the one to try first is the first."""
        return samples_of(await self._json(get_call("/v1/samples")))

    async def close(self) -> None:
        """Close the connections of this client. Safe to call twice."""
        await self._http.session.close()

    async def _whole(self, options: dict[str, Any], **usual: Any) -> GenerateResult:
        """Generate a whole answer. options: the caller's keywords; they replace the usual ones."""
        result: GenerateResult = await self.generate(stream=False, **{**usual, **options})
        return result

    async def _json(self, call: HttpCall) -> dict[str, Any]:
        return json_object(await self._http.fetch(call))

    async def _has_status(self, path: str, status: str) -> bool:
        try:
            return bool((await self._json(get_call(path, is_probe=True))).get("status") == status)
        except ClientError:
            return False


class AsyncMStarClient(ApiCalls):
    """Client of one deployment, for one event loop. Every call raises ClientError on failure.

    timeout: seconds without a byte after which a call fails; also the longest wait for a response to begin.
    session: an httpx.AsyncClient to send through; it stays open. retries: how often to resend a request that certainly
    has not started (no connection, 429, 503), after the delay that the server names.
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
        from mstar_core.client.http import AsyncSession, Http  # here, because httpx is slow to import

        super().__init__(Http(AsyncSession(session), base_url, timeout_s=timeout, api_key=api_key, retries=retries))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _frames(frames: Any, goal: Any = None) -> dict[str, Any]:
    """Return frames, then the goal after them, as arguments of `generate`. World models tell the two apart by order.

    Frames in files are sent as `video`, arrays as tensors. Raises TypeError for a mixture.
    """
    listed = list(frames) if isinstance(frames, list) else [frames]
    goals = [] if goal is None else [goal]
    is_array = [hasattr(item, "__array__") for item in (*listed, *goals)]
    if not any(is_array):
        return {"video": [*listed, *goals]}
    if all(is_array):
        return {"tensors": [*listed, *goals]}
    if is_array[-1] and not any(is_array[:-1]):
        return {"video": listed, "tensors": goals}
    raise TypeError("frames must be all files or all arrays; only the goal may be an array beside files")
