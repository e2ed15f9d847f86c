"""Keys with actions on the deployment, files and the app: confirmation, notices, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from mstar_core.errors import MstarError, Refused
from mstarctl.top.data.deployments import OtherDeployment
from tests.top.screen import FakeOthers, Shared, files_in, shared

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Shared]:
    """The app of this module's tests."""
    async with shared() as app:
        yield app


async def test_cancel_asks_first(running: Shared) -> None:
    async with running() as screen:
        assert "select a request first" in await screen.press("x")
        text = await screen.press("down", "x")
        request = screen.app.view().store.requests[str(screen.app.state.requests.cursor)]
        assert f"Cancel {request.id}?" in text
        await screen.press("n")
        assert screen.admin.acts == []
        text = await screen.press("x", "y")
        assert screen.admin.acts == [(f"/v1/requests/{request.id}/cancel", {"handle": request.handle})]
        assert f"{request.id} is being cancelled" in text


async def test_a_refused_action_shows_the_reason(running: Shared) -> None:
    async with running() as screen:
        screen.admin.error = Refused("request r-1 has ended", "finished")
        assert "request r-1 has ended; finished" in await screen.press("down", "x", "y")


async def test_drain_asks_first_and_then_offers_to_resume(running: Shared) -> None:
    async with running() as screen:
        assert "Drain qwen3_omni?" in await screen.press("D")
        await screen.press("y")
        store = screen.app.session.store  # type: ignore[attr-defined]  # of the live session
        store.deployment = msgspec.structs.replace(store.deployment, state="draining")
        assert "accept requests again?" in await screen.press("D")
        await screen.press("y")
        assert [path for path, _ in screen.admin.acts] == ["/v1/deployment/drain", "/v1/deployment/resume"]


async def test_readonly_disables_keys_with_actions(running: Shared) -> None:
    async with running(readonly=True) as screen:
        await screen.press("down", "x", "y", "D", "y")
        assert screen.admin.acts == []
        assert "cancel" not in screen.text
        await screen.press("escape")
        text = await screen.press("question_mark")
        assert "cancel the marked" not in text and "take no new" not in text


async def test_export_writes_a_file_in_each_form(running: Shared, tmp_path: Path) -> None:
    async with running(folder=tmp_path) as screen:
        for written, form in enumerate("cjntv", start=1):
            text = await screen.press("e", form)
            assert len(files_in(tmp_path)) == written and "wrote" in text, form
        assert all(path.stat().st_size > 500 for path in files_in(tmp_path))


async def test_a_waterfall_is_written_for_perfetto(running: Shared, tmp_path: Path) -> None:
    async with running(folder=tmp_path) as screen:
        await screen.press("enter", "p")
        (path,) = files_in(tmp_path)
        assert "traceEvents" in path.read_text()


async def test_r_records_and_stops(running: Shared, tmp_path: Path) -> None:
    async with running(folder=tmp_path) as screen:
        assert "rec" in await screen.press("r")
        screen.feed.put(*screen.admin.simulation.step())
        await screen.settled()
        await screen.press("r")
        assert [path.name for path in files_in(tmp_path)] == ["qwen3_omni-1.mstar.gz"]


async def test_plus_and_minus_change_the_frame_rate(running: Shared) -> None:
    async with running() as screen:
        assert "8 frames per second" in await screen.press("plus")
        await screen.press("minus", "minus")
        assert screen.feed.asked == [8.0, 4.0, 2.0]


async def test_mouse_reporting_can_be_switched(running: Shared) -> None:
    async with running() as screen:
        assert "mouse reporting off" in await screen.press("m")
        assert "mouse reporting on" in await screen.press("m")


async def test_o_switches_to_another_deployment(running: Shared) -> None:
    beside = FakeOthers(
        OtherDeployment(name="qwen3_omni", state="ready"), OtherDeployment(name="speech", state="draining", load=(3, 1))
    )
    async with running(others=beside) as screen:
        await screen.press("slash", *"state:run", "enter", "down")
        text = await screen.press("o")
        assert "this is qwen3_omni" in text and "speech" in text and "draining" in text and "3 run  1 queued" in text
        assert "qwen3_omni" in await screen.press("escape")
        before = screen.app.session
        text = await screen.press("o", "1")
        assert text.startswith(" speech") and "filter: state:run" in text and screen.app.session is not before
        assert screen.app.state.requests.cursor is None
        screen.feed.put(*screen.admin.simulation.step())
        assert "speech" in await screen.settled(), "the first one's frames are read no more"


async def test_o_shows_why_it_cannot_switch(running: Shared) -> None:
    async with running() as screen:
        assert "a replay shows one deployment" in await screen.press("o")
    alone = FakeOthers(OtherDeployment(name="qwen3_omni", state="ready"), gone="speech")
    async with running(others=alone) as screen:
        assert "no other deployment is running" in await screen.press("o")
        alone.error = MstarError("only this socket is known", hint="start top without --socket to see the others")
        assert "only this socket is known" in await screen.press("o")
        alone.error, alone.found = None, (OtherDeployment(name="speech", state="ready"),)
        text = await screen.press("o", "1")
        assert "no deployment 'speech' is running" in text and "qwen3_omni" in text
