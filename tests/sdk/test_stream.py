"""Streams of the synchronous client, from a real api: events, facts, failures, and that closing cancels."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest

from mstar_core.client import (
    ActionChunk,
    AudioChunk,
    Chunk,
    ErrorEvent,
    ImageChunk,
    MStarClient,
    ScalarChunk,
    Stream,
    StreamError,
    TensorChunk,
    TextChunk,
    VideoChunk,
)
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Api
from tests.fakes.any_model import ACTIONS, LATENTS, PIXELS, SOUND, WORDS, png
from tests.fakes.conductor import FakeDeployment, begin
from tests.fakes.speech_model import RATE
from tests.sdk.conftest import SHARED, in_thread


def first_then(stop: Callable[[Stream], object]) -> Callable[[MStarClient], object]:
    """Work that reads one event of a stream and then does `stop` with it."""

    def work(client: MStarClient) -> object:
        stream = client.stream(text="hi", output_modalities=("audio",))
        assert isinstance(next(stream), AudioChunk)
        return stop(stream)

    return work


@SHARED
async def test_every_line_is_an_event_of_its_kind(api: Api) -> None:
    kinds = ("text", "audio", "image", "video", "action", "scalar", "tensor")

    def work(client: MStarClient) -> tuple[Stream, list[object]]:
        with client.generate(text="hi", output_modalities=kinds, stream=True, seed=9, request_id="r-1") as stream:
            assert stream.request_id == "r-1"
            assert (stream.finish_reason, stream.usage) == (None, None)
            return stream, list(stream)

    stream, events = await in_thread(work, api.url)
    by_kind: dict[type, list[Chunk]] = {}
    for event in events:
        assert isinstance(event, Chunk)
        by_kind.setdefault(type(event), []).append(event)
    assert "".join(chunk.text for chunk in by_kind[TextChunk]) == WORDS  # type: ignore[attr-defined]
    assert b"".join(chunk.data for chunk in by_kind[AudioChunk]) == SOUND.tobytes()
    first = by_kind[AudioChunk][0]
    assert isinstance(first, AudioChunk) and (first.sample_rate, first.channels) == (RATE, 1)
    assert np.array_equal(first.to_numpy(), SOUND[:2048])
    (image,) = by_kind[ImageChunk]
    assert isinstance(image, ImageChunk) and (image.data, image.width, image.height) == (png(PIXELS), 5, 4)
    for kind, numbers in ((VideoChunk, LATENTS), (ActionChunk, ACTIONS), (TensorChunk, LATENTS)):
        (chunk,) = by_kind[kind]
        assert np.array_equal(chunk.to_numpy(), numbers)  # type: ignore[attr-defined]
    assert isinstance(by_kind[ScalarChunk][0], ScalarChunk) and by_kind[ScalarChunk][0].value == 7
    assert (stream.finish_reason, stream.seed) == ("stop", 9)
    assert stream.usage is not None and "total_ms" in stream.usage and stream.warnings == ["order text0"]


@pytest.mark.parametrize("how", ["close", "with", "drop"])
@SHARED
async def test_leaving_a_stream_cancels_its_request(how: str, api: Api) -> None:
    def leave(stream: Stream) -> object:
        if how == "close":
            stream.close()
            stream.close()
            return list(stream)
        if how == "with":
            with stream:
                return []
        return []  # the last name of the stream goes with this frame and its caller's

    api.fake.script = begin
    with MStarClient(api.url) as client:
        assert await asyncio.to_thread(first_then(leave), client) == []
        gc.collect()
        await api.fake.until(lambda: bool(api.fake.cancels))
        await api.until(lambda: api.service_is_clean)


@SHARED
async def test_a_stream_that_nobody_reads_is_cancelled_when_it_is_dropped(api: Api) -> None:
    api.fake.script = begin
    with MStarClient(api.url) as client:
        await asyncio.to_thread(lambda: client.stream(text="hi", output_modalities="audio") and None)
        await api.fake.until(lambda: bool(api.fake.cancels))


@SHARED
async def test_cancel_by_id_ends_the_stream_with_that_error(api: Api) -> None:
    def stop(stream: Stream) -> object:
        assert stream.cancel() is True
        with pytest.raises(StreamError, match="cancelled by its id") as caught:
            next(stream)
        assert stream.finish_reason is None
        with pytest.raises(StopIteration):
            next(stream)
        return (caught.value.status, caught.value.code, caught.value.request_id == stream.request_id)

    api.fake.script = begin
    assert await in_thread(first_then(stop), api.url) == (499, "cancelled", True)
    assert await in_thread(lambda c: c.cancel("nobody/of this"), api.url) is False


@SHARED
async def test_a_failure_comes_after_what_was_before_it_as_exception_or_as_event(api: Api) -> None:
    def break_down(fake: FakeDeployment, request: NewRequest) -> None:
        fake.audio(request.handle)
        asyncio.get_running_loop().call_later(0.2, fake.fail, request.handle)

    def as_event(client: MStarClient) -> list[object]:
        return list(client.stream(text="hi", output_modalities="audio", on_error="event"))

    api.fake.script = break_down
    sound, error = await in_thread(as_event, api.url)
    assert isinstance(sound, AudioChunk) and isinstance(error, ErrorEvent)
    assert (error.code, error.status, bool(error.request_id)) == ("engine_error", 500, True)
    with pytest.raises(StreamError) as caught:
        await in_thread(first_then(lambda stream: next(stream)), api.url)
    assert caught.value.code == "engine_error" and "Traceback" not in str(caught.value)


@SHARED
async def test_a_server_that_goes_away_in_the_middle_is_an_error(api: Api) -> None:
    api.fake.script = begin

    def work(client: MStarClient) -> object:
        stream = client.stream(text="hi", output_modalities="audio")
        next(stream)
        loop.call_soon_threadsafe(cut)
        with pytest.raises(StreamError, match="broke off") as caught:
            next(stream)
        return caught.value.code

    def cut() -> None:
        for live in api.process.registry:
            live.fail(RuntimeError("not ours"))  # type: ignore[arg-type]

    loop = asyncio.get_running_loop()
    assert await in_thread(work, api.url) == "broken_off"


def line(modality: str, data: bytes = b"", **metadata: object) -> bytes:
    body = {"modality": modality, "data": base64.b64encode(data).decode(), "metadata": metadata}
    return json.dumps(body).encode() + b"\n"


def served(*parts: bytes) -> MStarClient:
    """A client whose server sends these pieces."""

    def pieces() -> Iterator[bytes]:
        yield from parts

    answer = httpx.MockTransport(lambda request: httpx.Response(200, content=pieces()))
    return MStarClient("http://api", session=httpx.Client(transport=answer))


DONE = line("done", finish_reason="stop")
SOUND_LINE = line("audio", b"\1\2", sample_rate=RATE)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ((), "broken_off"),
        ((SOUND_LINE,), "broken_off"),
        ((SOUND_LINE[:-9],), "broken_off"),
        ((b"<html>\n",), "malformed"),
        ((b'{"modality": "text", "data": "*"}\n',), "malformed"),
        ((b"[1]\n",), "malformed"),
    ],
    ids=["empty", "no done", "cut", "no json", "no base64", "no object"],
)
def test_a_body_without_its_done_line_is_never_taken_for_whole(body: tuple[bytes, ...], code: str) -> None:
    events = list(served(*body).stream(text="x", on_error="event"))
    assert isinstance(events[-1], ErrorEvent) and events[-1].code == code
    with pytest.raises(StreamError):
        list(served(*body).stream(text="x"))


def test_nothing_counts_after_the_end() -> None:
    late = line("error", b"late", status=500, code="x")
    assert [type(event) for event in served(SOUND_LINE, DONE, late).stream(text="x")] == [AudioChunk]
    error = line("error", b"no", status=503, code="worker_lost")
    events = list(served(SOUND_LINE + error + SOUND_LINE).stream(text="x", on_error="event"))
    assert [type(event) for event in events] == [AudioChunk, ErrorEvent]


def test_an_output_in_parts_comes_as_one() -> None:
    facts = {"shape": [4], "dtype": "uint8", "name": "t", "parts": 2}
    lines = [line("tensor", b"\1\2", part=0, **facts), line("tensor", b"\3\4", part=1, **facts), DONE]
    (tensor,) = served(*lines).stream(text="x")
    assert isinstance(tensor, TensorChunk) and tensor.data == b"\1\2\3\4" and "parts" not in tensor.metadata
    assert tensor.to_numpy().tolist() == [1, 2, 3, 4]


def test_a_modality_of_a_later_server_is_a_plain_chunk() -> None:
    (event,) = served(line("smell", b"\1"), DONE).stream(text="x")
    assert type(event) is Chunk and (event.modality, event.data) == ("smell", b"\1")


@SHARED
async def test_an_output_of_more_than_one_line_arrives_whole(api: Api) -> None:
    big = np.arange(13 << 18, dtype=np.float32)  # 13 MiB, where a line holds 12

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        fake.output(request.handle, "tensor", big)
        fake.finish(request.handle)

    api.fake.script = answer
    (event,) = await in_thread(lambda c: list(c.stream(text="hi", output_modalities="tensor")), api.url)
    assert isinstance(event, TensorChunk) and np.array_equal(event.to_numpy(), big)
