"""App: the terminal shows the layout at any size, also after lost connections."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mstar_core.observe.frames import ResyncFrame
from mstarctl.top.app import TopApp
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.session import ReplaySession
from mstarctl.top.layout.pages import compose
from tests.top.models import qwen
from tests.top.pictures import EVERY_PAGE, SIZES, recording, state_of
from tests.top.screen import FakeAdmin, FakeFeed, Screen, running
from tests.top.streams import Simulation


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_terminal_shows_what_was_laid_out(size: tuple[int, int]) -> None:
    session = ReplaySession(recording("qwen3_omni"), clock=lambda: 0.0)
    session.start()
    session.skip(1e6)
    app = TopApp(session, DeploymentQueries(None, session), is_animated=False)
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot, FakeFeed(), FakeAdmin(Simulation(qwen())))
        for page in EVERY_PAGE:
            app.choose(state_of(page))
            await screen.settled()
            laid = compose(app.view(), app.state, *size, app.hints()).lines
            assert screen.text.splitlines() == [row.plain for row in laid]


async def test_a_resize_redraws_the_layout() -> None:
    async with running() as screen:
        await screen.press("slash")
        await screen.resized(80, 24)
        text = await screen.press("escape")
        assert {len(row) for row in text.splitlines()} == {80} and len(text.splitlines()) == 24
        assert "top needs 40x12" in await screen.resized(39, 11)


async def test_a_lost_socket_is_stale_until_it_is_back() -> None:
    async with running() as screen:
        screen.feed.state = ("stale", "its supervisor does not answer")
        text = await screen.settled()
        assert "stale: its supervisor does not answer" in text and "qwen3_omni" in text
        screen.feed.state = ("live", "")
        screen.feed.put(ResyncFrame(rev=1), screen.admin.simulation.store.snapshot())
        assert "▶ live" in await screen.settled()


async def test_a_new_boot_clears_the_screen() -> None:
    async with running() as screen:
        await screen.press("space")
        other = Simulation(replace(qwen(), name="other"), seed=2)
        screen.feed.put(*other.hello())
        text = await screen.settled()
        assert "other" in text and "paused" not in text


async def test_an_error_ends_the_app_and_is_kept() -> None:
    async def fail() -> TopApp:
        async with running() as screen:
            screen.feed.failure = RuntimeError("a bug")
            async with asyncio.timeout(60):
                while screen.app.failure is None:  # noqa: ASYNC110  the app's poll has no event
                    await asyncio.sleep(0.02)
            return screen.app

    with pytest.raises(RuntimeError, match="a bug"):
        await fail()


async def test_q_leaves() -> None:
    async with running() as screen:
        await screen.pilot.press("q")
        await screen.pilot.pause()
        assert screen.app._exit
