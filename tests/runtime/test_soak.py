"""Many requests with random ends: each has one outcome, afterwards nothing is held and no process has grown.

MSTAR_SOAK sets the number of requests for runs by hand.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.runtime.client import SURE, Heard, new_client, request, speak
from tests.runtime.deployment import Deployment

REQUESTS: Final = int(os.environ.get("MSTAR_SOAK", "300"))
SEED: Final = 20_250
AT_ONCE: Final = 10
LIMIT_S: Final = 60 + REQUESTS
WARM: Final = REQUESTS // 3
GROWTH_BYTES: Final = 8 << 20
"""What a process may grow by after the warm-up: allocators and rings settle, a leak per request would not."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(max_concurrent_requests=8, max_queue=8) as made:
        yield made


def resident(deployment: Deployment) -> dict[str, int]:
    """Resident bytes of every process that stays, by name."""
    page = os.sysconf("SC_PAGE_SIZE")
    read = {name: Path(f"/proc/{pid}/statm").read_text() for name, pid in deployment.pids().items()}
    return {name: int(text.split()[1]) * page for name, text in read.items()}


def descriptors(deployment: Deployment) -> dict[str, int]:
    """Open file descriptors by name of process."""
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in deployment.pids().items()}


class Crowd:
    """Clients that send seeded requests and leave them in seeded ways."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.sound: dict[int, bytes] = {}
        self._deployment = deployment
        self._random = random.Random(seed)
        self._number = 0

    async def run(self, count: int) -> None:
        async with new_client(self._deployment.url) as client:
            self._left = count
            await asyncio.gather(*(self._visit(client) for _ in range(AT_ONCE)))

    async def _visit(self, client: httpx.AsyncClient) -> None:
        while self._left > 0:
            self._left -= 1
            self._number += 1
            draw, name = self._random.random(), f"soak-{self._number}"
            tokens = self._random.choice((1, 20, 34, 48, 90))
            body = request(**SURE, max_output_tokens=tokens, request_id=name)
            if draw < 0.5:
                heard = await self._whole(client, body, tokens)
            elif draw < 0.7:
                heard = await self._leaving(client, {**body, "max_output_tokens": 1500}, self._random.randint(0, 3))
            elif draw < 0.8:
                heard = await self._cancelled(client, {**body, "max_output_tokens": 1500}, name)
            elif draw < 0.9:
                late = {**body, "max_output_tokens": 1500, "timeout_s": self._random.choice((0.001, 0.05, 0.4))}
                heard = await speak(client, late)
                assert heard.code in ("timeout", "queue_full"), heard.code
            else:
                heard = await speak(client, {**body, "temperature": "hot"})
                assert heard.status == 400
            self.outcomes[heard.code or ("whole" if heard.is_whole else "left")] += 1

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any], tokens: int) -> Heard:
        heard = await speak(client, body)
        if heard.status == 200:
            assert heard.is_whole, heard.errors
            assert self.sound.setdefault(tokens, heard.pcm) == heard.pcm
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
        assert heard.code in ("cancelled", "queue_full"), heard.code
        return heard


@pytest.mark.timeout(LIMIT_S)
async def test_every_request_has_one_outcome_and_nothing_grows(deployment: Deployment) -> None:
    crowd = Crowd(deployment, SEED)
    print(f"seed {SEED}, {REQUESTS} requests")
    await crowd.run(WARM)
    await asyncio.to_thread(deployment.assert_clean)
    before, open_before = resident(deployment), descriptors(deployment)
    await crowd.run(REQUESTS - WARM)
    await asyncio.to_thread(deployment.assert_clean)
    after, open_after = resident(deployment), descriptors(deployment)
    assert sum(crowd.outcomes.values()) == REQUESTS
    assert {"whole", "left", "cancelled"} <= crowd.outcomes.keys(), crowd.outcomes
    grown = {name: after[name] - before[name] for name in after}
    print(f"outcomes {dict(crowd.outcomes)}, grown {grown}")
    assert all(growth < GROWTH_BYTES for growth in grown.values()), grown
    assert all(open_after[name] <= open_before[name] + 4 for name in open_after), (open_before, open_after)
    assert deployment.admin("/v1")["restarts"] == 0
    assert deployment.complaints() == [], "ends of every kind are no errors of the server"
