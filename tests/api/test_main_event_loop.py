"""The busy-polling event loop serves timers, other threads and descriptors like any other loop."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mstar_core.api.main import busy_poll_loop
from mstar_core.transport import Spin
from tests.api.conftest import LIMITS
from tests.api.own_process import OwnApi, own_api, spec_in
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import SPEC

LONG_S = 60.0
BUSY_S = 0.7
"""CPU time of an api that looks on. One that sleeps and sends its heartbeats takes about half of it in `LONG_S`."""

CALM_S = 40.0
"""Time in which an api that was not roused becomes calm: shorter than `LONG_S`, for which a roused one looks on."""


def run(spin: Spin, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: busy_poll_loop(spin)) as runner:
        runner.run(work)


@pytest.mark.parametrize("span_s", [0.0, 0.05, LONG_S])
def test_timers_threads_and_descriptors_are_served_while_it_looks_on_and_after(span_s: float) -> None:
    spin = Spin(span_s)

    async def work() -> None:
        loop = asyncio.get_running_loop()
        spin.rouse()
        begun = time.monotonic()
        async with asyncio.timeout(LONG_S / 2):
            await asyncio.sleep(0.02)
            assert time.monotonic() - begun >= 0.02
            await asyncio.to_thread(time.sleep, 0.1)
            readable = asyncio.Event()
            event = os.eventfd(0)
            loop.add_reader(event, readable.set)
            threading.Timer(0.1, os.eventfd_write, (event, 1)).start()
            await readable.wait()
            loop.remove_reader(event)
            os.close(event)

    run(spin, work())


class Reads:
    """A clock that counts its readings, each a millisecond after the one before. Owned by a test."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 100.0 + 0.001 * self.count


def test_it_takes_the_core_while_it_looks_on_and_then_sleeps() -> None:
    """Each look reads the clock of the spin window, here of 300 looks."""
    spin = Spin(0.3, clock := Reads())

    async def work() -> None:
        async def looks(span_s: float = 0.05) -> int:
            before = clock.count
            await asyncio.sleep(span_s)
            return clock.count - before

        assert await looks() < 20, "nothing has roused it"
        for span_s in LIMITS:  # a busy machine may take the core away meanwhile
            spin.rouse()
            if await looks(span_s) > 250:
                break
        else:
            raise AssertionError("it did not look on")
        assert await looks() < 20

    run(spin, work())


async def test_a_body_that_begins_to_come_rouses_the_api_and_a_look_at_its_health_does_not() -> None:
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        spec = spec_in(folder, SPEC, wait_spin_us=round(LONG_S * 1e6))
        fake = FakeDeployment(spec.ipc_dir)
        fake.attach()
        try:
            async with own_api(spec, fake.supervisor, "tests.fakes.omni_model") as api:
                await fake.until(lambda: bool(fake.received))
                fake.ready()
                await api.ready()
                health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
                async with asyncio.timeout(CALM_S), sent(api, health) as answer:
                    assert (await answer.readline()).startswith(b"HTTP/1.1 200")
                    before, is_calm = api.cpu_s, False
                    while not is_calm:  # it may have work of its start
                        await asyncio.sleep(0.5)
                        before, is_calm = api.cpu_s, api.cpu_s - before < 0.1
                head = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                async with sent(api, head + b'Content-Length: 1000\r\n\r\n{"text"'), asyncio.timeout(LONG_S):
                    before = api.cpu_s
                    while api.cpu_s - before < BUSY_S:  # noqa: ASYNC110  no event marks it; it takes what the machine gives
                        await asyncio.sleep(0.05)
        finally:
            fake.close()


@asynccontextmanager
async def sent(api: OwnApi, data: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Send some bytes, and hold the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(data)
    try:
        yield reader
    finally:
        writer.close()
