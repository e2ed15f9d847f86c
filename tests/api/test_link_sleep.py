"""A deployment that sleeps, as its api shows it: requests wake it and wait, or are refused."""

from __future__ import annotations

import asyncio
import math

import pytest

from mstar_core.messages.life import Drained, ServiceState
from mstar_core.messages.sleep import WakeWanted
from tests.api.conftest import Started
from tests.api.test_errors import GOOD, error_of
from tests.fakes.conductor import speak

ASLEEP = ServiceState(state="sleeping", pause=4, reason="it gives its memory to others")


async def test_a_request_wakes_a_sleeping_deployment_and_waits(started: Started) -> None:
    async with started(speak(1)) as api:
        api.fake.tell(ASLEEP)
        await api.until(lambda: api.process.link.deployment.state == "sleeping")
        ready = await api.client.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "sleeping")
        assert (await api.client.get("/health")).json() == {"status": "healthy"}
        assert not api.fake.of(WakeWanted)
        waiting = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.fake.until(lambda: bool(api.fake.of(WakeWanted)))
        assert not api.fake.requests
        api.fake.tell(ServiceState(state="ready"))
        assert (await waiting).status_code == 200


async def test_a_request_that_waits_for_a_wake_keeps_its_time_limit(started: Started) -> None:
    async with started(speak(1)) as api:
        api.fake.tell(ASLEEP)
        await api.until(lambda: api.process.link.deployment.state == "sleeping")
        answer = await api.client.post("/generate", data={**GOOD, "timeout_s": "0.2"})
        assert (answer.status_code, error_of(answer)["code"]) == (504, "timeout")


async def test_without_wake_on_request_a_sleeping_deployment_refuses(started: Started) -> None:
    async with started(speak(1), wake_on_request=False) as api:
        api.fake.tell(ServiceState(state="ready", pause=4))
        await api.until(lambda: bool(api.process.link.deployment.pause))
        waiting = asyncio.create_task(api.client.post("/generate", data=GOOD))
        await api.until(lambda: api.process.link.gauges()["requests_waiting"] == 1)
        api.fake.tell(ASLEEP)
        answers = [await waiting, await api.client.post("/generate", data=GOOD)]
        for answer in answers:
            assert (answer.status_code, error_of(answer)["code"]) == (503, "sleeping")
            assert int(answer.headers["retry-after"]) > 0
        ready = await api.client.get("/ready")
        assert (ready.status_code, ready.json()["reason"], ready.headers["retry-after"]) == (503, "sleeping", "2")
        assert not api.fake.of(WakeWanted) and not api.fake.requests


@pytest.mark.parametrize("wakes", [False, True])
async def test_a_request_that_has_failed_wakes_nothing_until_its_handler_ends(started: Started, *, wakes: bool) -> None:
    async with started(speak(1), wake_on_request=wakes) as api:
        link, registry = api.process.link, api.process.registry
        with registry.open("slow-to-end", route="/generate", key="", started=0.0, deadline=math.inf) as live:
            if wakes:
                live.cancel()
            api.fake.tell(ASLEEP)
            await api.until(lambda: link.deployment.state == "sleeping")
            assert live.error is not None and len(registry) == 1
            link.want_wake()  # as each turn does
        api.fake.tell(ServiceState(state="sleeping", drain=9))
        await api.fake.until(lambda: Drained(drain=9) in api.fake.of(Drained))  # the messages before it have come too
        assert not api.fake.of(WakeWanted)
