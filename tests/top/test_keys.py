"""Keys and mouse on the screens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mstar_core.observe.frames import DeltaFrame
from mstarctl.output.line import cells
from mstarctl.top.keys import KEYS
from mstarctl.top.layout.state import PAGES, State
from mstarctl.top.widgets.dialog import Dialog
from mstarctl.top.widgets.filter_bar import FilterBar
from tests.top.pictures import EVERY_PAGE
from tests.top.screen import Shared, shared

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Shared]:
    """The app of this module's tests."""
    async with shared() as app:
        yield app


async def test_numbers_choose_the_screen(running: Shared) -> None:
    async with running() as screen:
        for number, page in enumerate(PAGES, start=1):
            text = await screen.press(str(number))
            assert screen.app.state.page == page
            assert f"{number} {page.capitalize()}" in text


async def test_arrows_select_rows_and_enter_opens_the_waterfall(running: Shared) -> None:
    async with running() as screen:
        await screen.press("down", "j", "up", "k", "down")
        keys = [key for kind, key in screen.app._painted.hits.values() if kind == "request"]
        assert screen.app.state.requests.cursor == keys[1]
        text = await screen.press("enter")
        r = screen.app.view().store.requests[keys[1]]
        assert r.id in text and "compute █" in text and "admission" in text
        text = await screen.press("escape")
        assert screen.app.state.page == "overview" and "REQUEST" in text


async def test_enter_without_a_selection_opens_the_first_row(running: Shared) -> None:
    async with running() as screen:
        first = next(key for kind, key in screen.app._painted.hits.values() if kind == "request")
        await screen.press("3", "enter")
        assert (screen.app.state.page, screen.app.state.request) == ("request", first)


async def test_a_waterfall_zooms_and_pans(running: Shared) -> None:
    async with running() as screen:
        await screen.press("enter")
        whole = screen.text
        assert await screen.press("plus") != whole
        start = screen.app.state.zoom.start_ms
        await screen.press("l", "right")
        assert screen.app.state.zoom.start_ms > start
        await screen.press("h", "left", "minus")
        assert screen.app.state.zoom.span_ms is None


async def test_the_filter_applies_while_typing_and_escape_restores_it(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("slash", *"state:run")
        assert "filter: state:run" in text and "enter keep" in text
        assert "queue  " not in "".join(row for row in text.splitlines() if row.startswith(" r-"))
        text = await screen.press("escape")
        assert "filter: none" in text
        await screen.press("slash", *"Thinker", "enter")
        assert screen.app.session.filter.text == "Thinker"
        text = await screen.press("escape")
        assert "filter: none" in text


async def test_an_invalid_filter_shows_an_error_and_keeps_the_previous_one(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("slash", *"nod:x")
        assert "did you mean 'node'" in text
        await screen.press("enter")
        assert screen.app.query_one("#filter").display
        await screen.press("escape")
        assert screen.app.session.filter.text == ""


async def test_sorting_cycles_through_columns_and_reverses(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("s")
        assert "TOOK↓" in text and "sort: took ↓" in text
        assert "TOOK↑" in await screen.press("S")
        assert "TTFT↓" in await screen.press("F") and "TTFT↑" in await screen.press("F")


async def test_the_description_changes_with_its_object(running: Shared) -> None:
    """The dialog reads the object of the newest frame when it is drawn again."""
    async with running() as screen:
        await screen.press("down")
        key = screen.app.state.requests.cursor or ""
        await screen.press("d")
        dialog = screen.app.screen
        assert isinstance(dialog, Dialog)
        store, t = screen.app.view().store, screen.app.view().store.t
        screen.feed.put(DeltaFrame(rev=store.rev + 1, t=t, after=store.rev, set={"requests": {key: {"tokens": 98765}}}))
        screen.app.poll()
        dialog.redraw()
        assert "98765" in await screen.settled()
        screen.feed.put(DeltaFrame(rev=store.rev + 1, t=t, after=store.rev, delete={"requests": [key]}))
        screen.app.poll()
        dialog.redraw()
        text = await screen.settled()
        assert "no longer shown" in text and "98765" in text
        await screen.press("escape")


async def test_a_click_on_a_tab_opens_its_screen(running: Shared) -> None:
    """A click between two tabs does nothing."""
    async with running() as screen:
        row, text = next((y, t) for y, t in enumerate(screen.text.splitlines()) if "2 Graph" in t)
        await screen.pilot.click("#main", offset=(text.index("4 Ranks") + 2, row))
        assert screen.app.state.page == "ranks"
        await screen.pilot.click("#main", offset=(text.index("5 Logs") - 2, row))
        assert screen.app.state.page == "ranks"


async def test_space_pauses_and_continues(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("space")
        assert "paused" in text
        screen.feed.put(*screen.admin.simulation.step(), *screen.admin.simulation.step())
        text = await screen.settled()
        assert "70 updates behind" in text and "0.5s back" in text
        assert "▶ live" in await screen.press("space")


async def test_comma_steps_back_and_full_stop_forward(running: Shared) -> None:
    async with running() as screen:
        newest = screen.app.view().store.t
        await screen.press("comma", "comma")
        assert screen.app.view().store.t == newest - 0.5
        await screen.press("full_stop")
        assert screen.app.view().store.t == newest - 0.25
        await screen.press("less_than_sign")
        assert screen.app.view().store.t == newest - 5
        await screen.press("greater_than_sign")
        assert screen.app.view().store.t == newest


async def test_tab_goes_to_the_ranks_and_enter_opens_one(running: Shared) -> None:
    async with running() as screen:
        await screen.press("tab", "down")
        assert (screen.app.state.panel, screen.app.state.rank) == ("ranks", "1")
        text = await screen.press("enter")
        assert screen.app.state.page == "ranks" and "memory" in text and "Talker step" in text


async def test_the_graph_highlights_walks_and_opens_nodes(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("w")
        assert "walk: prefill_text" in text
        await screen.press("right", "right", "left")
        assert screen.app.state.node == "audio_encoder"
        await screen.press("enter")
        assert (screen.app.state.page, screen.app.state.rank) == ("ranks", "0")
        await screen.press("enter")
        assert screen.app.state.page == "graph"


async def test_g_shows_the_node_of_the_selected_request(running: Shared) -> None:
    async with running() as screen:
        await screen.press("down", "g")
        key = screen.app.state.requests.cursor
        assert screen.app.state.node == screen.app.view().store.requests[str(key)].node


async def test_logs_are_read_and_filtered(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("5")
        assert "line of api" in text and "line of worker-1" in text
        text = await screen.press("tab")
        assert "line of api" in text and "line of worker-1" not in text
        await screen.press("escape")
        text = await screen.press("slash", *"worker-1", "enter")
        assert "line of worker-1" in text and "line of api" not in text
        await screen.press("1", "tab", "l")
        assert (screen.app.state.page, screen.app.state.log_source) == ("logs", "worker-0")


async def test_l_on_a_request_shows_its_lines(running: Shared) -> None:
    async with running() as screen:
        await screen.press("down", "l")
        request = screen.app.view().store.requests[str(screen.app.state.requests.cursor)]
        assert screen.app.state.log_text == request.id


async def test_events_are_selected_filtered_and_open_their_request(running: Shared) -> None:
    async with running(page="events") as screen:
        simulation = screen.admin.simulation
        simulation_request = simulation.live[0]
        screen.feed.put(simulation._told("kv.preempt", {"request": simulation_request.id, "why": "pool full"}))
        await screen.settled()
        await screen.press("up", "end", "up")
        await screen.press("enter")
        assert screen.app.state.request == str(simulation_request.handle)
        text = await screen.press("6", "escape", "slash", *"api.", "enter")
        assert "api.refused" in text and "kv.preempt" not in text


async def test_recordings_of_load_tests_are_listed(running: Shared) -> None:
    async with running() as screen:
        await screen.press("7")
        screen.app.refresh_queries()
        text = await screen.settled()
        assert "nightly" in text and "25 %" in text and "rate 8/s" in text


async def test_pages_and_ends_scroll(running: Shared) -> None:
    async with running((80, 24)) as screen:
        rows = len(screen.app.view().store.requests)
        await screen.press("end")
        last = screen.app.state.requests.cursor
        await screen.press("home")
        assert screen.app.state.requests.cursor != last
        await screen.press("pagedown", "pagedown", "pageup", "pagedown", "pagedown")
        assert screen.app.state.requests.cursor == last and rows > 12


async def test_describe_and_json_show_the_selected_object(running: Shared) -> None:
    async with running() as screen:
        text = await screen.press("d")
        assert "deployment/qwen3_omni" in text and "ttft p50 ms" in text
        await screen.press("escape")
        await screen.press("down")
        text = await screen.press("y")
        assert "request/r-" in text and '"handle":' in text
        await screen.press("c", "q")
        request = screen.app.view().store.requests[str(screen.app.state.requests.cursor)]
        assert f'"id": "{request.id}"' in screen.app.clipboard
        await screen.press("c")
        assert screen.app.clipboard == request.id


async def test_help_lists_every_key_that_works(running: Shared) -> None:
    async with running((120, 60)) as screen:
        text = await screen.press("question_mark")
        for key in KEYS:
            if "overview" in key.pages:
                assert key.help in text, key.help
        assert "ttft>500" in text
        assert "active keys" not in await screen.press("escape")


async def test_the_palette_has_every_command(running: Shared) -> None:
    async with running() as screen:
        await screen.press("colon")
        await screen.press(*"sort")
        await screen.pilot.pause(0.3)
        text = await screen.press("enter")
        assert "sort (s)" in text or screen.app.state.sort.key == "age"


async def test_a_click_selects_a_second_one_opens_and_a_title_sorts(running: Shared) -> None:
    async with running() as screen:
        hits = screen.app._painted.hits
        y = next(y for y, (kind, _) in hits.items() if kind == "request")
        titles = next(y for y, (kind, _) in hits.items() if kind == "titles")
        await screen.pilot.click("#main", offset=(5, y))
        await screen.settled()
        assert screen.app.state.requests.cursor == hits[y][1]
        await screen.pilot.click("#main", offset=(screen.text.splitlines()[titles].index("TOKENS") + 2, titles))
        await screen.settled()
        assert screen.app.state.sort.key == "tokens"
        y = next(
            y for y, hit in screen.app._painted.hits.items() if hit == ("request", screen.app.state.requests.cursor)
        )
        await screen.pilot.click("#main", offset=(5, y))
        await screen.settled()
        assert screen.app.state.page == "request"


async def test_every_key_leaves_a_complete_screen(running: Shared, tmp_path: Path) -> None:
    """Each on the first screen where it works. Questions are closed without an answer."""
    for page in EVERY_PAGE:
        names = [name for key in KEYS if page == min(key.pages, key=EVERY_PAGE.index) for name in key.keys.split(",")]
        async with running(folder=tmp_path) as screen:
            screen.app.choose(State(page=page))
            if page == "request":
                screen.app.choose(State())
                await screen.press("down", "enter")
            start = screen.app.state
            for name in names:
                if name in ("q", "ctrl+c"):  # has its own test
                    continue
                screen.app.choose(start)
                text = await screen.press(name)
                assert [cells(row) for row in text.splitlines()] == [120] * 34, name
                if len(screen.app.screen_stack) > 1 or screen.app.query_one(FilterBar).display:
                    await screen.press("escape")
            assert screen.admin.acts == []
            screen.app.session.stop()
