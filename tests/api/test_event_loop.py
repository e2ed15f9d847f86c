"""The busy-polling event loop serves timers, other threads and descriptors like any other loop."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from mstar_core.api.main import busy_poll_loop
from mstar_core.transport import Spin
from tests.api.own_process import OwnApi, own_api, spec_in
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import SPEC

LONG_S = 60.0


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


def test_it_takes_the_core_while_it_looks_on_and_then_sleeps() -> None:
    spin = Spin(0.3)

    async def work() -> None:
        async def spent(seconds: float) -> float:
            begun = time.thread_time()
            await asyncio.sleep(seconds)
            return time.thread_time() - begun

        assert await spent(0.2) < 0.02, "nothing has roused it"
        spin.rouse()
        assert await spent(0.3) > 0.02
        assert await spent(0.2) < 0.02

    run(spin, work())


def test_a_timer_beyond_the_time_of_looking_on_is_not_late_by_that_time() -> None:
    spin = Spin(2.0)

    async def work() -> None:
        spin.rouse()
        begun = time.monotonic()
        await asyncio.sleep(2.1)
        assert 2.1 <= time.monotonic() - begun < 3.8

    run(spin, work())


@pytest.mark.timeout(120)
async def test_a_body_that_begins_to_come_rouses_the_api_and_a_look_at_its_health_does_not() -> None:
    with tempfile.TemporaryDirectory(prefix="mstar-api-") as folder:
        spec = spec_in(folder, SPEC, wait_spin_us=1_000_000)
        fake = FakeDeployment(spec.ipc_dir)
        fake.attach()
        try:
            async with own_api(spec, fake.supervisor, "tests.fakes.omni_model") as api:
                await fake.until(lambda: bool(fake.received))
                fake.ready()
                await api.ready()
                assert await _spent(api, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") < 0.1
                head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                assert await _spent(api, head + b'Content-Length: 1000\r\n\r\n{"text"') > 0.1
        finally:
            fake.close()


async def _spent(api: OwnApi, data: bytes) -> float:
    """Return the CPU seconds of the api in the half second after it received some bytes."""
    _, writer = await asyncio.open_connection("127.0.0.1", api.port)
    before = api.cpu_s
    writer.write(data)
    await asyncio.sleep(0.5)
    spent = api.cpu_s - before
    writer.close()
    return spent
