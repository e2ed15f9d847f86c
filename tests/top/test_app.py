"""The program without a terminal: every key, the mouse, sizes, losses. Text comes from the compositor's strips."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from mstar_core.errors import MstarError, Refused
from mstar_core.observe.frames import Frame, ResyncFrame, encode
from mstarctl.top.app import TopApp
from mstarctl.top.asking import Asking
from mstarctl.top.feed import Arrival
from mstarctl.top.keys import KEYS
from mstarctl.top.layout.pages import compose
from mstarctl.top.layout.state import PAGES, State
from mstarctl.top.session import LiveSession, ReplaySession
from tests.top.models import qwen
from tests.top.pictures import EVERY_PAGE, SIZES, recording, state_of
from tests.top.recorded import trace
from tests.top.streams import Simulation


class FakeFeed:
    """A watch that the test tells: what is put here has arrived."""

    def __init__(self) -> None:
        self.waiting: list[Arrival] = []
        self.state = ("live", "")
        self.asked: list[float] = []
        self.failure: Exception | None = None

    def put(self, *frames: Frame) -> None:
        self.waiting += [Arrival(0.0, encode(frame), frame) for frame in frames]

    def take(self) -> list[Arrival]:
        if self.failure is not None:
            raise self.failure
        found, self.waiting = self.waiting, []
        return found

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def ask(self, hz: float) -> None:
        self.asked.append(hz)

    def ask_again(self) -> None: ...


class FakeLogs:
    """Logs that were never asked for, or three lines."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []

    def start(self) -> None:
        self.waiting = [{"from": name, "line": f"line of {name}"} for name in ("api", "worker-0", "worker-1")]

    def stop(self) -> None: ...

    def take(self) -> list[dict[str, Any]]:
        found, self.waiting = self.waiting, []
        return found


class FakeAdmin:
    """Answers traces and recordings; remembers what it was told to do."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.acts: list[tuple[str, dict[str, Any]]] = []
        self.error: MstarError | None = None

    def get(self, path: str) -> dict[str, Any]:
        if path == "/v1/recordings":
            return {"items": [{"id": "a1", "name": "nightly", "state": "recording", "requests": 120, "size_bytes": 4096,
                               "dropped": 0, "progress": {"done": 120, "total": 480, "rate": "8/s"}}]}  # fmt: skip
        handle = int(path.rsplit("=", 1)[1])
        return trace(self.simulation, next(r for r in self.simulation.live if r.handle == handle))

    def post(self, path: str, **arguments: Any) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.acts.append((path, arguments))
        return {}


def files_in(folder: Path) -> list[Path]:
    """What was written."""
    return sorted(folder.iterdir())


class Screen:
    """A running app and what stands behind it."""

    def __init__(self, app: TopApp, pilot: Pilot[None], feed: FakeFeed, admin: FakeAdmin) -> None:
        self.app, self.pilot, self.feed, self.admin = app, pilot, feed, admin

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    async def press(self, *keys: str) -> str:
        """Press keys, let everything settle, give the screen."""
        for key in keys:
            await self.pilot.press(key)
        return await self.settled()

    async def settled(self) -> str:
        await self.app.workers.wait_for_complete()
        self.app.poll()
        await self.pilot.pause()
        return self.text


@asynccontextmanager
async def running(
    size: tuple[int, int] = (120, 34), *, readonly: bool = False, folder: Path | None = None, page: str = "overview"
) -> AsyncIterator[Screen]:
    """An app over a live session of a deployment that is told by a simulation."""
    simulation = Simulation(qwen(), seed=11)
    feed, admin = FakeFeed(), FakeAdmin(simulation)
    feed.put(*(frame for _, frame in simulation.frames(5)))
    session = LiveSession(feed, FakeLogs(), readonly=readonly, clock=lambda: 0.0)  # type: ignore[arg-type]  # fakes
    app = TopApp(session, Asking(admin, session), folder=folder, is_animated=False, state=State(page=page))
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot, feed, admin)
        await screen.settled()
        yield screen


@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_the_terminal_shows_what_was_laid_out(size: tuple[int, int]) -> None:
    session = ReplaySession(recording("qwen3_omni"), clock=lambda: 0.0)
    session.start()
    session.skip(1e6)
    app = TopApp(session, Asking(None, session), is_animated=False)
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot, FakeFeed(), FakeAdmin(Simulation(qwen())))
        for page in EVERY_PAGE:
            app.choose(state_of(page))
            await pilot.pause()
            laid = compose(app.view(), app.state, *size, app.hints()).lines
            assert screen.text.splitlines() == [row.plain for row in laid]


# -- keys ---------------------------------------------------------------------------------------------------------


async def test_numbers_choose_the_screen() -> None:
    async with running() as screen:
        for number, page in enumerate(PAGES, start=1):
            text = await screen.press(str(number))
            assert screen.app.state.page == page
            assert f"{number} {page.capitalize()}" in text


async def test_arrows_mark_rows_and_enter_opens_the_waterfall() -> None:
    async with running() as screen:
        await screen.press("down", "j", "up", "k", "down")
        keys = [key for kind, key in screen.app._painted.hits.values() if kind == "request"]
        assert screen.app.state.requests.cursor == keys[1]
        text = await screen.press("enter")
        r = screen.app.view().store.requests[keys[1]]
        assert r.id in text and "compute █" in text and "admission" in text
        text = await screen.press("escape")
        assert screen.app.state.page == "overview" and "REQUEST" in text


async def test_enter_without_a_mark_opens_the_first_row() -> None:
    async with running() as screen:
        first = next(key for kind, key in screen.app._painted.hits.values() if kind == "request")
        await screen.press("3", "enter")
        assert (screen.app.state.page, screen.app.state.request) == ("request", first)


async def test_a_waterfall_zooms_and_pans() -> None:
    async with running() as screen:
        await screen.press("enter")
        whole = screen.text
        assert await screen.press("plus") != whole
        start = screen.app.state.zoom.start_ms
        await screen.press("l", "right")
        assert screen.app.state.zoom.start_ms > start
        await screen.press("h", "left", "minus")
        assert screen.app.state.zoom.span_ms is None


async def test_the_filter_works_as_one_types_and_escape_undoes_it() -> None:
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


async def test_a_wrong_filter_says_what_is_wrong_and_keeps_the_one_before() -> None:
    async with running() as screen:
        text = await screen.press("slash", *"nod:x")
        assert "did you mean 'node'" in text
        await screen.press("enter")
        assert screen.app.query_one("#filter").display
        await screen.press("escape")
        assert screen.app.session.filter.text == ""


async def test_sorting_goes_through_the_columns_and_turns_round() -> None:
    async with running() as screen:
        text = await screen.press("s")
        assert "TTFT↓" in text and "sort: ttft ↓" in text
        assert "TTFT↑" in await screen.press("S")


async def test_space_freezes_and_goes_on() -> None:
    async with running() as screen:
        text = await screen.press("space")
        assert "paused" in text
        screen.feed.put(*screen.admin.simulation.step(), *screen.admin.simulation.step())
        text = await screen.settled()
        assert "70 updates behind" in text and "0.5s back" in text
        assert "▶ live" in await screen.press("space")


async def test_commas_step_back_and_points_on() -> None:
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


async def test_tab_goes_to_the_ranks_and_enter_opens_one() -> None:
    async with running() as screen:
        await screen.press("tab", "down")
        assert (screen.app.state.panel, screen.app.state.rank) == ("ranks", "1")
        text = await screen.press("enter")
        assert screen.app.state.page == "ranks" and "memory" in text and "Talker step" in text


async def test_the_graph_is_walked_through_and_its_nodes_opened() -> None:
    async with running() as screen:
        text = await screen.press("w")
        assert "walk: prefill_text" in text
        await screen.press("right", "right", "left")
        assert screen.app.state.node == "audio_encoder"
        await screen.press("enter")
        assert (screen.app.state.page, screen.app.state.rank) == ("ranks", "0")
        await screen.press("enter")
        assert screen.app.state.page == "graph"


async def test_g_shows_the_node_of_the_marked_request() -> None:
    async with running() as screen:
        await screen.press("down", "g")
        key = screen.app.state.requests.cursor
        assert screen.app.state.node == screen.app.view().store.requests[str(key)].node


async def test_logs_are_read_and_narrowed() -> None:
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


async def test_l_on_a_request_shows_its_lines() -> None:
    async with running() as screen:
        await screen.press("down", "l")
        request = screen.app.view().store.requests[str(screen.app.state.requests.cursor)]
        assert screen.app.state.log_text == request.id


async def test_events_are_marked_filtered_and_lead_to_their_request() -> None:
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


async def test_recordings_of_load_tests_are_listed() -> None:
    async with running() as screen:
        await screen.press("7")
        screen.app.ask()
        text = await screen.settled()
        assert "nightly" in text and "25 %" in text and "rate 8/s" in text


async def test_pages_and_ends_scroll() -> None:
    async with running((80, 24)) as screen:
        rows = len(screen.app.view().store.requests)
        await screen.press("end")
        last = screen.app.state.requests.cursor
        await screen.press("home")
        assert screen.app.state.requests.cursor != last
        await screen.press("pagedown", "pagedown", "pageup", "pagedown", "pagedown")
        assert screen.app.state.requests.cursor == last and rows > 12


async def test_describe_and_json_show_what_is_marked() -> None:
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


async def test_help_lists_every_key_that_works() -> None:
    async with running((120, 60)) as screen:
        text = await screen.press("question_mark")
        for key in KEYS:
            if "overview" in key.pages:
                assert key.help in text, key.help
        assert "ttft>500" in text
        assert "keys that work here" not in await screen.press("escape")


async def test_the_palette_has_every_command() -> None:
    async with running() as screen:
        await screen.press("colon")
        await screen.press(*"sort")
        await screen.pilot.pause(0.3)
        text = await screen.press("enter")
        assert "sort (s)" in text or screen.app.state.sort.key == "ttft"


# -- acting -------------------------------------------------------------------------------------------------------


async def test_cancel_asks_first() -> None:
    async with running() as screen:
        assert "mark a request first" in await screen.press("x")
        text = await screen.press("down", "x")
        request = screen.app.view().store.requests[str(screen.app.state.requests.cursor)]
        assert f"Cancel {request.id}?" in text
        await screen.press("n")
        assert screen.admin.acts == []
        text = await screen.press("x", "y")
        assert screen.admin.acts == [(f"/v1/requests/{request.id}/cancel", {"handle": request.handle})]
        assert f"{request.id} is being cancelled" in text


async def test_a_refused_act_says_why() -> None:
    async with running() as screen:
        screen.admin.error = Refused("request r-1 has ended", "finished")
        assert "request r-1 has ended; finished" in await screen.press("down", "x", "y")


async def test_drain_asks_first_and_then_offers_to_resume() -> None:
    async with running() as screen:
        assert "Drain qwen3_omni?" in await screen.press("D")
        await screen.press("y")
        store = screen.app.session.store  # type: ignore[attr-defined]  # of the live session
        store.deployment = msgspec.structs.replace(store.deployment, state="draining")
        assert "take requests again?" in await screen.press("D")
        await screen.press("y")
        assert [path for path, _ in screen.admin.acts] == ["/v1/deployment/drain", "/v1/deployment/resume"]


async def test_readonly_has_no_keys_that_act() -> None:
    async with running(readonly=True) as screen:
        await screen.press("down", "x", "y", "D", "y")
        assert screen.admin.acts == []
        assert "cancel" not in screen.text
        await screen.press("escape")
        text = await screen.press("question_mark")
        assert "cancel the marked" not in text and "take no new" not in text


@pytest.mark.parametrize("form", ["c", "j", "n", "t", "v"])
async def test_export_writes_a_file(form: str, tmp_path: Path) -> None:
    async with running(folder=tmp_path) as screen:
        text = await screen.press("e", form)
        (path,) = files_in(tmp_path)
        assert path.stat().st_size > 500 and "wrote" in text


async def test_a_waterfall_is_written_for_perfetto(tmp_path: Path) -> None:
    async with running(folder=tmp_path) as screen:
        await screen.press("enter", "p")
        (path,) = files_in(tmp_path)
        assert "traceEvents" in path.read_text()


async def test_r_records_and_stops(tmp_path: Path) -> None:
    async with running(folder=tmp_path) as screen:
        assert "rec" in await screen.press("r")
        screen.feed.put(*screen.admin.simulation.step())
        await screen.settled()
        await screen.press("r")
        assert [path.name for path in files_in(tmp_path)] == ["qwen3_omni-1.mstar.gz"]


async def test_plus_and_minus_ask_for_another_pace() -> None:
    async with running() as screen:
        assert "8 frames a second" in await screen.press("plus")
        await screen.press("minus", "minus")
        assert screen.feed.asked == [8.0, 4.0, 2.0]


async def test_the_mouse_can_be_given_back() -> None:
    async with running() as screen:
        assert "the terminal's" in await screen.press("m")
        assert "ours again" in await screen.press("m")


async def test_q_leaves() -> None:
    async with running() as screen:
        await screen.pilot.press("q")
        await screen.pilot.pause()
        assert screen.app._exit


# -- mouse --------------------------------------------------------------------------------------------------------


async def test_a_click_marks_a_second_one_opens_and_a_title_sorts() -> None:
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


# -- losses -------------------------------------------------------------------------------------------------------


async def test_a_resize_lays_out_anew() -> None:
    async with running() as screen:
        await screen.press("slash")
        await screen.pilot.resize_terminal(80, 24)
        text = await screen.press("escape")
        assert {len(row) for row in text.splitlines()} == {80} and len(text.splitlines()) == 24
        await screen.pilot.resize_terminal(39, 11)
        assert "top needs 40x12" in await screen.settled()


async def test_a_lost_socket_is_stale_until_it_is_back() -> None:
    async with running() as screen:
        screen.feed.state = ("stale", "its supervisor does not answer")
        text = await screen.settled()
        assert "stale: its supervisor does not answer" in text and "qwen3_omni" in text
        screen.feed.state = ("live", "")
        screen.feed.put(ResyncFrame(rev=1), screen.admin.simulation.store.snapshot())
        assert "▶ live" in await screen.settled()


async def test_a_new_boot_begins_anew() -> None:
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
            await screen.pilot.pause(0.3)
            return screen.app

    with pytest.raises(RuntimeError, match="a bug"):
        await fail()


# -- the table of keys --------------------------------------------------------------------------------------------


def test_every_binding_has_help_that_fits() -> None:
    for key in KEYS:
        assert key.help and key.label and key.shown, key
        assert len(key.help) <= 46, key.help


def test_no_two_keys_of_a_screen_are_the_same() -> None:
    for page in EVERY_PAGE:
        names = [name for key in KEYS if page in key.pages for name in key.keys.split(",")]
        assert len(names) == len(set(names)), page


def test_every_action_exists() -> None:
    for key in KEYS:
        name = key.action.partition("(")[0]
        assert isinstance(getattr(TopApp, f"action_{name}"), Callable), name  # type: ignore[arg-type]  # abc works here
