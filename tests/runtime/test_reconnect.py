"""Clients that lose their connection and come back, against real processes: they get one whole response."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mstar_core.client import AudioChunk, MStarClient
from tests.fakes.cutting_proxy import CuttingProxy
from tests.runtime.client import SURE, new_client, request, speak
from tests.runtime.deployment import Deployment, until

PARAMS: dict[str, Any] = {**SURE, "max_output_tokens": 160}
LONG: dict[str, Any] = {**SURE, "max_output_tokens": 800}
"""Parameters of a response in whose middle the api dies, also if its client is slow."""

DETACH = {"X-Mstar-Detach": "true"}


@pytest.fixture(scope="module")
def served() -> Iterator[Deployment]:
    with Deployment(max_concurrent_requests=8) as deployment:
        yield deployment


async def test_a_client_that_is_cut_off_gets_the_same_sound(served: Deployment) -> None:
    async with new_client(served.url) as client:
        calm = await speak(client, request(**PARAMS))

    def hear() -> bytes:
        with MStarClient(proxy.url) as client:
            stream = client.stream(text="hello there", output_modalities="audio", reconnect=True, **PARAMS)
            return b"".join(event.data for event in stream if isinstance(event, AudioChunk))

    with CuttingProxy(httpx.URL(served.url).port or 0, [9000, 40_000, 1000]) as proxy:
        assert await asyncio.to_thread(hear) == calm.pcm
        assert proxy.opened == 4
    await asyncio.to_thread(served.assert_clean)


async def test_numbers_stay_those_of_the_client_when_the_api_dies(served: Deployment) -> None:
    """The client that stays has the whole response; one that joins after the death gets what follows a number."""
    lines: list[bytes] = []
    async with new_client(served.url) as client:
        calm = await speak(client, request(**LONG))
        headers = {"X-Request-ID": "kept", **DETACH}
        async with client.stream("POST", "/generate", json=request(**LONG), headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line:
                    lines.append(line.encode())
                if len(lines) == 4 and line:
                    served.kill(served.pids()["api"])
        late = await client.get("/v1/requests/kept/events", params={"after": len(lines) - 3})
        early = await client.get("/v1/requests/kept/events")
    assert late.content.splitlines() == lines[-3:]
    assert (early.status_code, early.json()["error"]["code"]) == (410, "events_gone")
    assert b"".join(sound(line) for line in lines) == calm.pcm
    await asyncio.to_thread(until, lambda: served.admin("/v1")["state"] == "ready", "ready again")
    await asyncio.to_thread(served.assert_clean)


def sound(line: bytes) -> bytes:
    """The audio of a line, empty for other lines."""
    fields = json.loads(line)
    return base64.b64decode(fields["data"]) if fields["modality"] == "audio" else b""
