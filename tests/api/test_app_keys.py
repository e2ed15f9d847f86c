"""Keys of a deployment file that no other api test covers: each changes the behavior."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from tests.api.conftest import Api, Started, running
from tests.fakes import media
from tests.fakes.conductor import echo, speak
from tests.fakes.omni_model import SPEC

GOOD = {"text": "x", "output_modalities": "audio"}


async def test_the_port_is_open_at_the_address_of_the_file_and_at_no_other(started: Started) -> None:
    async with started(speak(1)) as api:
        url = urlsplit(api.url)
        assert url.hostname == "127.0.0.1"
        with socket.create_connection(("127.0.0.1", url.port or 0), 60):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(
                ("127.0.0.2", url.port or 0), 60
            )  # accepted by an api that listens on all addresses


@pytest.mark.parametrize("is_open", [False, True])
async def test_metrics_need_a_key_unless_they_are_open(started: Started, is_open: bool) -> None:
    async with started(speak(1), api_keys=("k",), metrics_open=is_open) as api:
        assert (await api.client.get("/metrics")).status_code == (200 if is_open else 401)
        assert (await api.client.get("/v1/models")).status_code == 401


async def test_a_request_lives_as_long_as_the_file_says(started: Started) -> None:
    async with started(timeout_s=0.5) as api:
        answer = await api.client.post("/generate", data=GOOD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        await api.clean()


@pytest.mark.parametrize("count", [1, 2])
async def test_as_many_processes_read_media_as_the_file_says(count: int) -> None:
    async with running(echo, model=SPEC, pool_processes=count) as api:
        assert len(set(api.process.pool.pids)) == count


async def test_the_remaining_limits_of_media_reach_the_pool() -> None:
    limits = {"max_image_side": 10, "max_video_width": 32, "max_video_height": 16, "max_decoded_bytes": 40_000}
    async with running(echo, model=SPEC, **limits) as api:
        for kind, whole, over in (
            ("image", media.image(10, 6), media.image(11, 6)),
            ("video", media.video(32, 16, frames=5, rate=10), media.video(48, 16, frames=5, rate=10)),
            ("video", media.video(32, 16, frames=5, rate=10), media.video(32, 32, frames=5, rate=10)),
            ("audio", media.wav(0.5, 16_000), media.wav(1.0, 16_000)),
        ):
            assert await status(api, kind, whole) == (200, "")
            assert await status(api, kind, over) == (413, "media_too_large")


async def status(api: Api, kind: str, data: bytes) -> tuple[int, str]:
    answer = await api.client.post(
        "/generate", data={"text": "x", "input_modalities": kind}, files={"files": ("a", data)}
    )
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]
