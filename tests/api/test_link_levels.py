"""Levels that the supervisor sets while processes restart: requests wait in the queue, connections in the socket."""

from __future__ import annotations

import asyncio

from mstar_core.messages.life import Drained, ServiceState
from tests.api.conftest import Started
from tests.api.test_access import GOOD
from tests.fakes.conductor import begin, speak


async def test_requests_of_a_pause_wait_and_those_before_it_end_it(started: Started) -> None:
    async with started(begin) as api:
        async with api.client.stream("POST", "/generate", data=GOOD) as before:
            request = await api.fake.next_request()
            api.fake.tell(ServiceState(state="starting", pause=4))
            waiting = asyncio.create_task(api.client.post("/generate", data=GOOD))
            await api.until(lambda: api.process.link.gauges()["requests_waiting"] == 1)
            assert not api.fake.of(Drained)
            api.fake.finish(request.handle)
            assert before.status_code == 200 and await before.aread()
        await api.fake.until(lambda: [message.drain for message in api.fake.of(Drained)] == [4])
        assert len(api.fake.requests) == 1 and (await api.client.get("/ready")).status_code == 200
        api.fake.script = speak(1)
        api.fake.tell(ServiceState(state="ready"))
        assert (await waiting).status_code == 200


async def test_a_handover_ends_with_the_last_answer_and_accepts_no_connection(started: Started) -> None:
    async with started(begin) as api:
        async with api.client.stream("POST", "/generate", data=GOOD) as before:
            request = await api.fake.next_request()
            api.fake.tell(ServiceState(state="degraded", handover=2))
            await api.until(lambda: api.process.link.deployment.handover == 2)
            reader, writer = await asyncio.open_connection("127.0.0.1", api.process.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.sleep(0)
            assert not api.fake.of(Drained)
            api.fake.finish(request.handle)
            assert before.status_code == 200 and await before.aread()
        await api.fake.until(lambda: [message.drain for message in api.fake.of(Drained)] == [2])
        assert not reader._buffer  # type: ignore[attr-defined]  # the connection waits for the next api
        api.fake.tell(ServiceState(state="ready"))  # there is none: the restart was abandoned
        assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200")
        writer.close()
