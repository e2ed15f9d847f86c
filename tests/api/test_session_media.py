"""Images of sessions: each is decoded once for all requests of its session, within a limit of bytes."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mstar_core.api.requests.session_media import LOOP_BYTES, SessionMedia
from mstar_core.api.requests.sessions import SessionLimits, Sessions
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.processor import Inputs, KeptMedia, MediaPart, PromptRequest
from tests.api.conftest import Api, Started
from tests.fakes.conductor import echo
from tests.fakes.media import image
from tests.fakes.omni_model import SPEC

CHAT = "/v1/chat/completions"
SIZE = 100


class Decoder:
    """A processor. Its decoded image has SIZE bytes. decoded: data of the files that it has decoded."""

    def __init__(self) -> None:
        self.decoded: list[bytes] = []

    async def read(self, request: PromptRequest) -> Inputs:
        kept = {}
        for number, part in enumerate(request.media):
            if part.kept is None or part.kept.content != part.data[:1]:
                self.decoded.append(part.data)
                kept[number] = KeptMedia(content=part.data[:1], arrays={"pixels": np.zeros(SIZE, np.uint8)})
        return Inputs(kept=kept if request.keeps_media else {})


def asking(*files: bytes, modality: str = "image") -> PromptRequest:
    return PromptRequest(text=None, media=[MediaPart(modality=modality, data=data) for data in files])


class World:
    """Media of sessions that are open, and a processor."""

    def __init__(self, most_bytes: int = 2 * SIZE, opened: str = "ab") -> None:
        self.media, self.decoder = SessionMedia(most_bytes, opened.__contains__), Decoder()

    async def decoded(self, session: str, *files: bytes) -> list[bytes]:
        """Return the files that a request decodes."""
        self.decoder.decoded = []
        inputs = await self.media.read(session, asking(*files), self.decoder.read)
        assert not inputs.kept
        return self.decoder.decoded


@pytest.mark.parametrize("size", [1, LOOP_BYTES + 1])
async def test_a_file_is_decoded_once_in_its_session(size: int) -> None:
    world, file = World(), b"x" * size
    assert await world.decoded("a", file) == [file]
    assert await world.decoded("a", file, b"y") == [b"y"]
    assert await world.decoded("b", file) == [file]  # sessions do not share


async def test_the_file_that_was_used_least_recently_leaves_first() -> None:
    world = World()
    await world.decoded("a", b"x", b"y")
    assert await world.decoded("a", b"x") == []
    assert await world.decoded("b", b"z") == [b"z"] and world.media.size_bytes == 2 * SIZE
    assert await world.decoded("a", b"x") == []
    assert await world.decoded("a", b"y") == [b"y"]


@pytest.mark.parametrize("most_bytes", [0, SIZE - 1])
async def test_a_file_beyond_the_limit_is_not_kept(most_bytes: int) -> None:
    world = World(most_bytes)
    assert await world.decoded("a", b"x") == await world.decoded("a", b"x") == [b"x"]
    assert world.media.size_bytes == 0


async def test_nothing_is_kept_for_a_session_that_has_ended_meanwhile() -> None:
    world = World()
    assert await world.decoded("c", b"x") == [b"x"]
    assert world.media.size_bytes == 0


async def test_the_end_of_a_session_frees_its_media() -> None:
    now, decoder = [0.0], Decoder()
    limits = SessionLimits(idle_s=10, ttl_s=50, most=2, media_bytes=4 * SIZE)
    sessions = Sessions(limits, lambda: now[0], lambda name: None)

    async def ask(name: str) -> None:
        with sessions.request("", name) as session:
            assert session is not None
            await sessions.media.read(session.name, asking(b"x"), decoder.read)

    for name in "ab":
        await ask(name)
    assert sessions.media.size_bytes == 2 * SIZE
    sessions.delete("", "a")
    assert sessions.media.size_bytes == SIZE
    await ask("c")
    await ask("d")  # b leaves, because there is no room for a third session
    assert sessions.media.size_bytes == 2 * SIZE
    now[0] = 20.0
    assert len(sessions) == sessions.media.size_bytes == 0


async def test_other_media_and_requests_without_them_pass_unchanged() -> None:
    seen: list[PromptRequest] = []

    async def read(request: PromptRequest) -> Inputs:
        seen.append(request)
        return Inputs()

    sent = [asking(b"x", modality="audio"), replace(asking(), text="hello")]
    for request in sent:
        await World().media.read("a", request, read)
    assert seen == sent


def picture(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def ask(api: Api, *files: bytes, **fields: Any) -> NewRequest:
    """Chat with images. Returns the request that the runtime got."""
    content = [*map(picture, files), {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}], **fields}
    answer = await api.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return api.fake.requests[-1]


async def test_the_second_chat_of_a_session_decodes_only_new_images(started: Started) -> None:
    first, second = image(8, 6), image(9, 7)
    async with started(echo, model=SPEC) as api:
        alone = await ask(api, first, second)
        assert alone.facts == {}
        assert (await ask(api, first, session_id="s")).facts == {"decoded": 1}
        again = await ask(api, first, second, session_id="s")
        assert again.facts == {"decoded": 1}
        assert api.fake.prompt(again) == api.fake.prompt(alone)
        assert (await ask(api, first, second, session_id="s")).facts == {"decoded": 0}
        metrics = (await api.client.get("/metrics")).text
        assert 'mstar_session_images_total{how="kept"} 3.0' in metrics
        assert 'mstar_session_images_total{how="decoded"} 2.0' in metrics
        assert "mstar_session_media_bytes 32.0" in metrics  # two sizes, of two numbers each
        assert (await api.client.delete("/v1/sessions/s")).status_code == 200
        assert (await ask(api, first, session_id="s")).facts == {"decoded": 1}


async def test_without_room_for_images_every_request_decodes_them(started: Started) -> None:
    async with started(echo, model=SPEC, sessions_media_bytes=0) as api:
        for _ in range(2):
            assert (await ask(api, image(), session_id="s")).facts == {}  # the processor need not keep anything
