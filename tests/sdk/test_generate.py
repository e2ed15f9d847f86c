"""Whole answers of the synchronous client, from a real api: every kind of input and output, and the shorter calls."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mstar_core.api.output.line_formats import BINARY
from mstar_core.client import ClientError, ErrorEvent, Event, GenerateResult, MStarClient, TensorChunk
from mstar_core.client.reader import FrameReader
from mstar_core.errors import TransportError
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Api
from tests.fakes import media
from tests.fakes.any_model import ACTIONS, LATENTS, PIXELS, SOUND, WORDS, facts, png
from tests.fakes.conductor import FakeDeployment, say
from tests.fakes.speech_model import RATE
from tests.sdk.conftest import SHARED, any_api, in_thread

EVERY = ("text", "audio", "image", "video", "action", "scalar", "tensor")
PNG = png(PIXELS)
WAV = media.wav()
CLIP = media.video()


@SHARED
async def test_a_result_holds_every_kind_of_output(api: Api) -> None:
    got = await in_thread(lambda c: c.generate(text="hi", output_modalities=EVERY, seed=4, request_id="mine"), api.url)
    assert isinstance(got, GenerateResult)
    assert (got.text, got.request_id, got.seed, got.finish_reason) == (WORDS, "mine", 4, "stop")
    assert got.images == [PNG]
    assert got.audio is not None and (got.audio.pcm, got.audio.sample_rate) == (SOUND.tobytes(), RATE)
    assert np.array_equal(got.actions[0].to_numpy(), ACTIONS) and got.actions[0].shape == (3, 2)
    assert np.array_equal(got.tensors[0].to_numpy(), LATENTS) and got.tensors[0].dtype == "float32"
    assert np.array_equal(got.video[0].to_numpy(), LATENTS)
    assert got.scalars[0].value == 7
    assert got.usage is not None and got.usage["completion_tokens"] >= 0
    assert set(got.raw) >= {"outputs", "usage"}


@SHARED
async def test_files_arrive_in_order_with_their_bytes_and_their_kind(tmp_path: Path, api: Api) -> None:
    path = tmp_path / "left eye.png"
    path.write_bytes(PNG)
    array = np.ones((2, 2), dtype=np.float32)

    def work(client: MStarClient) -> GenerateResult:
        return client.generate(
            text="hi", images=[path, ("b.png", PNG), PNG], audio=WAV, video=[CLIP, str(path)], tensors=array
        )

    got = await in_thread(work, api.url)
    npy = io.BytesIO()
    np.save(npy, array)
    assert got.warnings == [
        facts("image", "left eye.png", PNG),
        facts("image", "b.png", PNG),
        facts("image", "image-2", PNG),
        facts("audio", "audio-0", WAV),
        facts("video", "video-0", CLIP),
        facts("image", "left eye.png", PNG),
        facts("tensor", "tensor-0.npy", npy.getvalue()),
        "order image0,image1,image2,audio0,video0,image3,tensor0,text0",
    ]


@SHARED
async def test_the_order_that_the_model_reads_may_be_given(api: Api) -> None:
    order = ("text", "audio", "image")
    got = await in_thread(lambda c: c.generate(text="hi", images=PNG, audio=WAV, input_modalities=order), api.url)
    assert got.warnings[-1] == "order text0,audio0,image0"


@SHARED
async def test_parameters_reach_the_model_and_none_is_left_out(api: Api) -> None:
    await in_thread(
        lambda c: c.generate(text="hi", voice="leo", temperature=None, robot_state=np.arange(3) / 2), api.url
    )
    params = api.fake.requests[0].params
    assert (params["voice"], params["temperature"], list(params["robot_state"])) == ("leo", 0.6, [0.0, 0.5, 1.0])


@SHARED
async def test_the_shorter_calls_give_their_part_of_the_answer(tmp_path: Path, api: Api) -> None:
    def work(client: MStarClient) -> dict[str, Any]:
        return {
            "chat": client.chat("hi", images=PNG),
            "image": client.generate_image("a cat", seed=1),
            "edit": client.edit_image("bluer", PNG),
            "tts": client.tts("hi", voice="leo", request_id="spoken"),
            "act": client.act([PNG, PNG], "pick up", np.array([0.5, 1])),
            "encode": client.encode(CLIP),
            "rollout": client.rollout(CLIP, [[0.0] * 7], [[0.0] * 7], goal=PNG),
            "plan": client.plan(PNG, np.zeros((2, 2), dtype=np.float32), [0.0] * 7),
        }

    got = await in_thread(work, api.url)
    asked = {request.params["task"]: list(request.outputs) for request in api.fake.requests}
    sent = api.fake.requests
    assert got["chat"].text == WORDS
    assert got["image"] == got["edit"] == PNG
    assert len(got["tts"]) == len(SOUND) and got["tts"].seconds == len(SOUND) / RATE
    assert np.array_equal(got["act"].to_numpy(), ACTIONS)
    assert np.array_equal(got["encode"].tensors[0].to_numpy(), LATENTS)
    assert got["plan"].scalars[0].value == 7
    assert asked["encode"] == ["tensor"] and asked["rollout"] == asked["plan"] == ["tensor", "scalar"]
    assert [line.partition(" ")[0] for line in got["rollout"].result.warnings] == ["video", "image", "order"]
    assert [line.partition(" ")[0] for line in got["plan"].result.warnings] == ["image", "tensor", "order"]
    assert (sent[3].params["voice"], list(sent[4].params["robot_state"])) == ("leo", [0.5, 1.0])


@SHARED
async def test_sound_and_images_are_saved_as_files(tmp_path: Path, api: Api) -> None:
    got = await in_thread(lambda c: c.generate(text="hi", output_modalities="audio,image"), api.url)
    assert got.save_image(tmp_path / "a.png").read_bytes() == PNG
    with wave.open(str(got.save_audio(tmp_path / "a.wav"))) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (RATE, len(SOUND))
        assert sound.readframes(len(SOUND)) == SOUND.tobytes()
    with pytest.raises(ClientError, match="1 output of the kind image, none at index 1"):
        got.save_image(tmp_path / "b.png", index=1)


@SHARED
async def test_an_answer_without_what_is_asked_for_says_what_the_server_said(api: Api) -> None:
    api.fake.script = say(b"no sound")
    with pytest.raises(ClientError, match="0 outputs of the kind audio.*order text0") as caught:
        await in_thread(lambda c: c.tts("hi"), api.url)
    assert caught.value.code == "no_output" and caught.value.request_id


async def test_models_health_and_ready_tell_the_state() -> None:
    async with any_api(ready=False) as api:
        assert await in_thread(lambda c: (c.health(), c.ready()), api.url, retries=5) == (False, False)
        await api.ready()
        assert await in_thread(lambda c: (c.health(), c.ready()), api.url) == (True, True)
        (model,) = await in_thread(lambda c: c.models(), api.url)
    assert (model.id, model.root, model.aliases) == ("fake", "fake/weights", ["fake_any", "fake/weights"])
    assert set(model.output_modalities) == set(EVERY)
    assert "voice" in model.parameters["properties"] and "/generate" in model.endpoints
    with MStarClient("http://127.0.0.1:1") as client:
        assert (client.health(), client.ready()) == (False, False)


def watched(seen: list[tuple[str, str]]) -> httpx.Client:
    """A session that notes what was asked for and what came."""

    def note(response: httpx.Response) -> None:
        seen.append((response.request.headers["Accept"], response.headers["Content-Type"]))

    return httpx.Client(event_hooks={"response": [note]})


@SHARED
async def test_numbers_come_as_frames_and_everything_else_as_json(api: Api) -> None:
    seen: list[tuple[str, str]] = []

    def work(client: MStarClient) -> tuple[GenerateResult, GenerateResult]:
        numbers = client.generate(text="hi", output_modalities=EVERY, seed=4)
        return numbers, client.generate(text="hi", output_modalities="audio,image,text")

    with watched(seen) as session:
        got, plain = await in_thread(work, api.url, session=session)
    assert [kind for _, kind in seen] == ["application/x-mstar-frames", "application/json; charset=utf-8"]
    assert seen[0][0] == "application/x-mstar-frames, application/json;q=0.5" and "frames" not in seen[1][0]
    assert (got.text, got.seed, got.finish_reason, got.images) == (WORDS, 4, "stop", [PNG])
    assert got.raw["outputs"]["tensor"][0]["data"] == LATENTS.tobytes() and got.raw["usage"] == got.usage
    assert plain.audio == got.audio and plain.warnings == got.warnings


@SHARED
async def test_a_number_of_no_dimension_keeps_its_shape(api: Api) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.output(request.handle, "tensor", np.float32(2.5).reshape(()))
        fake.finish(request.handle)

    def work(client: MStarClient) -> list[Event]:
        whole = client.generate(text="hi", output_modalities="tensor")
        with client.stream(text="hi", output_modalities="tensor") as events:
            return [whole.tensors[0], *events]

    api.fake.script = script
    for chunk in await in_thread(work, api.url):
        assert isinstance(chunk, TensorChunk)
        assert (chunk.shape, chunk.to_numpy().shape, float(chunk.to_numpy())) == ((), (), 2.5)


@SHARED
async def test_a_failure_in_frames_is_raised_as_in_lines(api: Api) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.output(request.handle, "tensor", LATENTS)
        fake.fail(request.handle)

    def work(client: MStarClient) -> list[str]:
        with pytest.raises(ClientError) as whole:
            client.generate(text="hi", output_modalities="tensor")
        with client.stream(text="hi", output_modalities="tensor", on_error="event") as events:
            *chunks, error = events
        assert isinstance(error, ErrorEvent) and len(chunks) == 1
        return [str(whole.value.code), error.code]

    api.fake.script = script
    assert await in_thread(work, api.url) == ["engine_error", "engine_error"]


@pytest.mark.parametrize("size", [1, 5, 13, 10_000])
def test_frames_are_read_in_pieces_of_any_size(size: int) -> None:
    body = b"".join(BINARY.line("tensor", bytes([n]) * n, {"step": n}) for n in range(5))
    reader, lines = FrameReader(), []
    for at in range(0, len(body), size):
        lines += reader.push(body[at : at + size])
    assert [(line.modality, line.data, line.metadata) for line in lines] == [
        ("tensor", bytes([n]) * n, {"step": n}) for n in range(5)
    ]
    assert reader.is_between and not reader.push(body[:-1])[4:] and not reader.is_between


def test_what_is_no_frame_is_told_as_such() -> None:
    for body in (b"\xff" * 12, struct.pack("<IQ", 2, 0) + b"[]", struct.pack("<IQ", 1, 0) + b"x"):
        with pytest.raises(TransportError, match="cannot be read"):
            FrameReader().push(body)


def test_an_answer_of_something_else_is_an_error_and_not_health() -> None:
    page = httpx.MockTransport(lambda request: httpx.Response(200, html="<p>sign in"))
    with httpx.Client(transport=page) as session, MStarClient("http://x", session=session) as client:
        assert client.health() is False and client.ready() is False
        with pytest.raises(ClientError, match="not from a deployment"):
            client.generate(text="hi")
        with pytest.raises(ClientError, match="not from a deployment"):
            client.models()
