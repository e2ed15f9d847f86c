"""The event loop that looks on before it sleeps: timers, other threads and descriptors are served as by any other."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from mstar_core.api.spin_loop import spin_loop
from mstar_core.transport import Spin

LONG_S = 60.0


def run(spin: Spin, work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: spin_loop(spin)) as runner:
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
            assert await asyncio.to_thread(time.sleep, 0.1) is None
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


def test_a_timer_beyond_the_time_of_looking_on_is_not_late_and_not_early() -> None:
    spin = Spin(0.05)

    async def work() -> None:
        spin.rouse()
        begun = time.monotonic()
        await asyncio.sleep(0.2)
        assert 0.2 <= time.monotonic() - begun < LONG_S / 2

    run(spin, work())
