"""Clients with seeded requests and seeded disconnects; each request has one outcome."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx

from tests.runtime.client import SURE, Heard, new_client, request, speak
from tests.runtime.deployment import Deployment

AT_ONCE: Final = 10
LONG: Final = 1500
"""Ids of a request that its client ends early: 15 s of audio."""


class Crowd:
    """`AT_ONCE` clients. outcomes: numbers of requests by code. sound: bytes of complete responses by length."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.sound: dict[int, bytes] = {}
        self._deployment = deployment
        self._random = random.Random(seed)
        self._number = 0
        self._left = 0

    @property
    def sent(self) -> int:
        """Number of requests so far."""
        return self._number

    async def run(self, count: int) -> None:
        """Send `count` requests and wait for the end of each."""
        async with new_client(self._deployment.url) as client:
            self._left = count
            await asyncio.gather(*(self._visit(client) for _ in range(AT_ONCE)))

    async def run_short(self, count: int) -> None:
        """Send `count` requests of one id, so that all records of ended requests are full."""
        async with new_client(self._deployment.url) as client:
            for _ in range(0, count, AT_ONCE):
                heard = [speak(client, request(max_output_tokens=1)) for _ in range(AT_ONCE)]
                assert all(each.is_whole for each in await asyncio.gather(*heard))

    async def _visit(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            self._left -= 1
            self._number += 1
            heard = await self._one(client, self._random.random(), f"crowd-{self._number}")
            self.outcomes[heard.code or ("whole" if heard.is_whole else "left")] += 1

    async def _one(self, client: httpx.AsyncClient, draw: float, name: str) -> Heard:
        tokens = self._random.choice((1, 20, 34, 48, 90))
        body = request(**SURE, max_output_tokens=tokens, request_id=name)
        long = {**body, "max_output_tokens": LONG}
        if draw < 0.5:
            return await self._whole(client, body, tokens)
        if draw < 0.7:
            return await self._leaving(client, long, self._random.randint(0, 3))
        if draw < 0.8:
            return await self._cancelled(client, long, name)
        if draw < 0.9:
            heard = await speak(client, {**long, "timeout_s": self._random.choice((0.001, 0.05, 0.4))})
            assert heard.code in ("timeout", "queue_full"), heard.code
            return heard
        heard = await speak(client, {**body, "temperature": "hot"})
        assert heard.status == 400
        return heard

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any], tokens: int) -> Heard:
        heard = await speak(client, body)
        if heard.status == 200:
            assert heard.is_whole, heard.errors
            assert self.sound.setdefault(tokens, heard.pcm) == heard.pcm, "neighbours changed a request's bytes"
        else:
            assert heard.code == "queue_full"
        return heard

    async def _leaving(self, client: httpx.AsyncClient, body: dict[str, Any], chunks: int) -> Heard:
        heard = await speak(client, body, leave=lambda heard: len(heard.chunks) >= chunks)
        assert not heard.is_whole
        return heard

    async def _cancelled(self, client: httpx.AsyncClient, body: dict[str, Any], name: str) -> Heard:
        heard = Heard()
        running = asyncio.create_task(speak(client, body, heard))
        await heard.first.wait()
        await client.post(f"/v1/requests/{name}/cancel")
        await running
        assert heard.code in ("cancelled", "queue_full") or heard.is_whole, heard.code  # whole: it came too late
        return heard


def resident(deployment: Deployment) -> dict[str, int]:
    """Return the resident bytes of every permanent process, by name."""
    page = os.sysconf("SC_PAGE_SIZE")
    read = {name: Path(f"/proc/{pid}/statm").read_text() for name, pid in deployment.pids().items()}
    return {name: int(text.split()[1]) * page for name, text in read.items()}


def descriptors(deployment: Deployment) -> dict[str, int]:
    """Return the number of open file descriptors by process."""
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in deployment.pids().items()}
