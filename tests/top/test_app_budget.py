"""CPU cost of `top` with a watch of 2000 updates per second and 500 requests."""

from __future__ import annotations

import time

import pytest

from mstar_core.observe.frames import encode
from mstarctl.client.store import decode
from mstarctl.top.app import TopApp
from mstarctl.top.data.feed import Arrival
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.session import LiveSession
from tests.top.models import qwen
from tests.top.screen import FakeAdmin, FakeFeed, FakeLogs
from tests.top.streams import Simulation

REQUESTS = 500
HZ = 4.0
SHARE = 0.25
"""Limits as shares of one core. The slow tests check them; the short ones only detect a multiple of them."""


class LineFeed(FakeFeed):
    """A fake feed of raw lines, so that the measurement includes decoding."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []

    def take(self) -> list[Arrival]:
        lines, self.lines = self.lines, []
        return [Arrival(0.0, line, frame) for line in lines if (frame := decode(line)) is not None]


def stream(seconds: float) -> tuple[Simulation, list[list[bytes]]]:
    """Return lines by tick. Nearly every request changes in each, which makes 2000 updates per second."""
    simulation = Simulation(qwen(), seed=9, requests=REQUESTS, hz=HZ)
    ticks = [simulation.hello()]
    while len(ticks) < seconds * HZ:
        ticks.append(simulation.step())
    return simulation, [[encode(frame) for frame in tick] for tick in ticks]


async def cost(seconds: float, page: str, pace: float = 1.0) -> tuple[float, float]:
    """Return (CPU seconds, elapsed seconds) of drawing the screen while frames arrive in real time."""
    simulation, ticks = stream(seconds)
    feed = LineFeed()
    session = LiveSession(feed, FakeLogs(), clock=time.monotonic)  # type: ignore[arg-type]  # fakes
    app = TopApp(session, DeploymentQueries(FakeAdmin(simulation), session))
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.press(page)
        feed.lines += ticks[0]
        await pilot.pause(0.3)
        cpu, wall = time.process_time(), time.monotonic()
        for tick in ticks[1:]:
            feed.lines += tick
            await pilot.pause(pace / HZ)
        return time.process_time() - cpu, time.monotonic() - wall


@pytest.mark.parametrize("page", ["1", "2"])
async def test_a_busy_deployment_costs_little(page: str) -> None:
    seconds = 2.0
    used, _ = await cost(seconds, page)
    assert used < 4 * SHARE * seconds, f"{used:.1f} s of a core for {seconds:g} s of frames"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["1", "2", "3", "4"])
async def test_five_busy_seconds_cost_less_than_a_quarter_of_a_core(page: str) -> None:
    used, wall = await cost(5.0, page)
    print(f"page {page}: {100 * used / wall:.1f} % of a core over {wall:.1f} s")
    assert used / wall < SHARE


@pytest.mark.slow
async def test_an_idle_deployment_costs_almost_nothing() -> None:
    simulation = Simulation(qwen(), requests=1)
    feed = FakeFeed()
    session = LiveSession(feed, FakeLogs(), clock=time.monotonic)  # type: ignore[arg-type]  # fakes
    app = TopApp(session, DeploymentQueries(FakeAdmin(simulation), session))
    async with app.run_test(size=(120, 34)) as pilot:
        await pilot.pause(0.5)
        cpu, wall = time.process_time(), time.monotonic()
        await pilot.pause(5.0)
        share = (time.process_time() - cpu) / (time.monotonic() - wall)
    print(f"idle: {100 * share:.1f} % of a core")
    assert share < 0.03
