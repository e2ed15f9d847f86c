"""AsyncMStarClient: the client of one deployment on an event loop. For programs of users."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from mstar_core.client.answer import object_of, result_from
from mstar_core.client.async_stream import AsyncStream
from mstar_core.client.call import Call, cancel_call, generate_call, get_call, probe_call, transcribe_call
from mstar_core.client.event import ActionChunk
from mstar_core.client.failure import MStarError
from mstar_core.client.media import Media
from mstar_core.client.model_info import ModelInfo, models_of
from mstar_core.client.result import (
    GenerateResult,
    LatentResult,
    actions_of,
    image_of,
    latents_of,
    sound_of,
)
from mstar_core.client.shortcut import (
    action_arguments,
    edit_arguments,
    encode_arguments,
    image_arguments,
    plan_arguments,
    rollout_arguments,
    speech_arguments,
)
from mstar_core.client.sound import AudioBuffer
from mstar_core.client.stream import OnError

if TYPE_CHECKING:
    pass


class AsyncMStarClient:
    """Speaks to one deployment. Belongs to one event loop. Every call raises MStarError when it fails.

    timeout: seconds without a byte after which a call gives up; also how long a whole answer may take to begin.
    session: an httpx.AsyncClient to send by; it stays open. retries: how often a request is sent again that surely
    never started (no connection, 429, 503), after the time that the server names.
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
        """Connects with the first call. Raises TypeError for a session of another kind."""
        from mstar_core.client.async_http import AsyncHttp  # here: httpx takes longer to load than all the rest

        self._http = AsyncHttp(base_url, timeout_s=timeout, session=session, api_key=api_key, retries=retries)

    @overload
    async def generate(
        self, *, text: str | None = None, images: Media | None = None, audio: Media | None = None,
        video: Media | None = None, output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None, stream: Literal[False] = False,
        request_id: str | None = None, tensors: Any = None, on_error: OnError = "raise", **model_kwargs: Any,
    ) -> GenerateResult: ...  # fmt: skip

    @overload
    async def generate(
        self, *, text: str | None = None, images: Media | None = None, audio: Media | None = None,
        video: Media | None = None, output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None, stream: Literal[True],
        request_id: str | None = None, tensors: Any = None, on_error: OnError = "raise", **model_kwargs: Any,
    ) -> AsyncStream: ...  # fmt: skip

    @overload
    async def generate(
        self, *, text: str | None = None, images: Media | None = None, audio: Media | None = None,
        video: Media | None = None, output_modalities: Sequence[str] | str = ("text",),
        input_modalities: Sequence[str] | str | None = None, stream: bool = False,
        request_id: str | None = None, tensors: Any = None, on_error: OnError = "raise", **model_kwargs: Any,
    ) -> GenerateResult | AsyncStream: ...  # fmt: skip

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
        **model_kwargs: Any,
    ) -> GenerateResult | AsyncStream:
        """One request of any kind; model_kwargs are the model's parameters, and those that are None are left out.

        images, audio, video: a path, bytes, (name, bytes), or a list. tensors: the same for npy and safetensors files,
        or arrays. input_modalities: the order in which the model reads them, where it is not images, audio, video,
        tensors, text. on_error: how a stream tells of its failure.
        """
        if on_error not in ("raise", "event"):
            raise ValueError(f'on_error is "raise" or "event", not {on_error!r}')
        make = partial(
            generate_call, text=text, images=images, audio=audio, video=video, output_modalities=output_modalities,
            input_modalities=input_modalities, stream=stream, request_id=request_id, tensors=tensors,
            model_kwargs=model_kwargs,
        )  # fmt: skip
        has_media = any(media is not None for media in (images, audio, video, tensors))
        call = await self._http.on_thread(make) if has_media else make()
        if stream:
            return AsyncStream(self._http, await self._http.open(call), on_error)
        return result_from(await self._http.fetch(call))

    async def stream(self, **kwargs: Any) -> AsyncStream:
        """The events of a request as they arrive: `generate(stream=True)`."""
        opened: AsyncStream = await self.generate(stream=True, **kwargs)
        return opened

    async def chat(
        self,
        prompt: str,
        *,
        images: Media | None = None,
        audio: Media | None = None,
        output_modalities: Sequence[str] | str = ("text",),
        stream: bool = False,
        **model_kwargs: Any,
    ) -> GenerateResult | AsyncStream:
        """An answer to a prompt, with images or sound beside it."""
        return await self.generate(
            text=prompt, images=images, audio=audio, output_modalities=output_modalities, stream=stream, **model_kwargs
        )

    async def generate_image(self, prompt: str, **model_kwargs: Any) -> bytes:
        """An image of what the prompt says, as PNG."""
        return image_of(await self._whole(image_arguments(prompt, model_kwargs)))

    async def edit_image(self, prompt: str, image: Media, **model_kwargs: Any) -> bytes:
        """An image changed as the prompt says, as PNG."""
        return image_of(await self._whole(edit_arguments(prompt, image, model_kwargs)))

    async def tts(self, text: str, *, voice: str | None = None, **model_kwargs: Any) -> AudioBuffer:
        """The text, spoken."""
        return sound_of(await self._whole(speech_arguments(text, voice, model_kwargs)))

    async def transcribe(self, audio: Media, **params: Any) -> str:
        """What is said in a sound. params: fields of /v1/audio/transcriptions, such as `language`."""
        return str((await self._json(await self._http.on_thread(partial(transcribe_call, audio, params))))["text"])

    async def act(self, images: Media, text: str | None, robot_state: Any, **model_kwargs: Any) -> ActionChunk:
        """A robot's next actions. images: its cameras, in the model's order. robot_state: joint values."""
        return actions_of(await self._whole(action_arguments(images, text, robot_state, model_kwargs)))

    async def encode(self, video: Any, **model_kwargs: Any) -> LatentResult:
        """The features of a clip. video: a file, frames as files, or an array of pixels."""
        return latents_of(await self._whole(encode_arguments(video, model_kwargs)))

    async def rollout(
        self, video: Any, actions: Any = None, states: Any = None, *, goal: Any = None, **model_kwargs: Any
    ) -> LatentResult:
        """What follows a clip under given actions. goal: an image or array that the outcomes are scored against."""
        return latents_of(await self._whole(rollout_arguments(video, actions, states, goal, model_kwargs)))

    async def plan(self, image: Any, goal: Any, state: Any, **model_kwargs: Any) -> LatentResult:
        """Actions that lead from what `image` shows to what `goal` shows. state: the robot's own, seven numbers."""
        return latents_of(await self._whole(plan_arguments(image, goal, state, model_kwargs)))

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when it has ended already, or when the server knows none of that id."""
        try:
            return bool((await self._json(cancel_call(request_id)))["status"] == "cancelled")
        except MStarError as error:
            if error.status == 404:
                return False
            raise

    async def health(self) -> bool:
        """Whether every process of the deployment is alive and it has finished starting."""
        return await self._says("/health", "healthy")

    async def ready(self) -> bool:
        """Whether a request would be taken now."""
        return await self._says("/ready", "ready")

    async def models(self) -> list[ModelInfo]:
        """What the deployment serves."""
        return models_of(await self._json(get_call("/v1/models")))

    async def close(self) -> None:
        """Close the connections made here. Safe to call twice."""
        await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _whole(self, arguments: dict[str, Any]) -> GenerateResult:
        made: GenerateResult = await self.generate(stream=False, **arguments)
        return made

    async def _json(self, call: Call) -> dict[str, Any]:
        return object_of(await self._http.fetch(call))

    async def _says(self, path: str, status: str) -> bool:
        try:
            return bool((await self._json(probe_call(path))).get("status") == status)
        except MStarError:
            return False
