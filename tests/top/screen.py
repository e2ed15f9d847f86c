"""The app without a terminal, over a simulated deployment. Text comes from the compositor's strips."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from mstar_core.errors import MstarError, NotFound
from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import Frame, encode
from mstarctl.top.app import TopApp
from mstarctl.top.data.deployments import OtherDeployment
from mstarctl.top.data.feed import Arrival
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.session import LiveSession, Session
from mstarctl.top.layout.state import State
from mstarctl.top.widgets.filter_bar import FilterBar
from tests.top.models import qwen
from tests.top.recorded import trace
from tests.top.streams import Simulation

SIZE: Final = (120, 34)
LIMIT_S: Final = 60.0


class FakeFeed:
    """A fake feed: frames that are put here have arrived."""

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
        arrivals, self.waiting = self.waiting, []
        return arrivals

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def set_rate(self, hz: float) -> None:
        self.asked.append(hz)

    def restart(self) -> None: ...


class FakeLogs:
    """A fake log feed: three lines after its start."""

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []

    def start(self) -> None:
        self.waiting = [{"from": name, "line": f"line of {name}"} for name in ("api", "worker-0", "worker-1")]

    def stop(self) -> None: ...

    def take(self) -> list[dict[str, Any]]:
        lines, self.waiting = self.waiting, []
        return lines


class FakeAdmin:
    """A fake admin client: answers traces and recordings, and records calls."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.acts: list[tuple[str, dict[str, Any]]] = []
        self.error: MstarError | None = None

    def get(self, path: str) -> dict[str, Any]:
        if path == "/v1/recordings":
            return {
                "items": [
                    {
                        "id": "a1",
                        "name": "nightly",
                        "state": "recording",
                        "requests": 120,
                        "size_bytes": 4096,
                        "dropped": 0,
                        "progress": {"done": 120, "total": 480, "rate": "8/s"},
                    }
                ]
            }
        handle = int(path.rsplit("=", 1)[1])
        return trace(self.simulation, next(r for r in self.simulation.live if r.handle == handle))

    def post(self, path: str, **arguments: Any) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.acts.append((path, arguments))
        return {}


class FakeOthers:
    """A fake switcher. gone: the deployment of this name has ended since it was listed."""

    def __init__(self, *found: OtherDeployment, gone: str = "") -> None:
        self.found, self.gone = found, gone
        self.error: MstarError | None = None

    def running(self) -> list[OtherDeployment]:
        if self.error is not None:
            raise self.error
        return list(self.found)

    def go(self, name: str) -> tuple[Session, DeploymentQueries]:
        if name == self.gone:
            raise NotFound(f"no deployment {name!r} is running")
        simulation = Simulation(replace(qwen(), name=name), seed=3)
        feed, admin = FakeFeed(), FakeAdmin(simulation)
        feed.put(*simulation.hello())
        session = LiveSession(feed, FakeLogs(), clock=lambda: 0.0)  # type: ignore[arg-type]  # fakes
        return session, DeploymentQueries(admin, session)


def files_in(folder: Path) -> list[Path]:
    """Return the written files."""
    return sorted(folder.iterdir())


class Screen:
    """A running app with its feed and admin client."""

    def __init__(self, app: TopApp, pilot: Pilot[None], feed: FakeFeed, admin: FakeAdmin) -> None:
        self.app, self.pilot, self.feed, self.admin = app, pilot, feed, admin

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip) for strip in strips)

    async def press(self, *keys: str) -> str:
        """Press keys, wait until idle, and return the screen."""
        for key in keys:
            await self.pilot.press(key)
        return await self.settled()

    async def resized(self, width: int, height: int) -> str:
        """Resize the terminal, wait until the app has drawn at this size, and return the screen."""
        await self.pilot.resize_terminal(width, height)

        def is_drawn() -> bool:
            pane = self.app._pane.size
            return self.app.size == (width, height) and pane.width == width and self.app._drawn[3:4] == (pane,)

        async with asyncio.timeout(LIMIT_S):
            while not is_drawn():
                await self.pilot.pause()
        return await self.settled()

    async def settled(self) -> str:
        """Return the screen once two readings are the same: the pilot takes an app without a core for an idle one."""
        before = await self._reading()
        while (text := await self._reading()) != before:
            before = text
        return text

    async def _reading(self) -> str:
        while any(not worker.is_finished for worker in self.app.workers):
            with suppress(WorkerCancelled):  # the app's next query has replaced it
                await self.app.workers.wait_for_complete()
        self.app.poll()
        await self.pilot.pause()
        return self.text


@cache
def _simulated() -> tuple[Simulation, tuple[Frame, ...]]:
    """Return a deployment after five seconds, and its frames."""
    simulation = Simulation(qwen(), seed=11)
    return simulation, tuple(frame for _, frame in simulation.frames(5))


def followed(*, readonly: bool = False) -> tuple[LiveSession, FakeFeed, FakeAdmin]:
    """Return a live session of a simulated deployment, with its feed and admin client."""
    simulation, frames = _simulated()
    feed, admin = FakeFeed(), FakeAdmin(deepcopy(simulation))
    feed.put(*frames)
    session = LiveSession(feed, FakeLogs(), readonly=readonly, clock=lambda: 0.0)  # type: ignore[arg-type]  # fakes
    return session, feed, admin


@asynccontextmanager
async def running(size: tuple[int, int] = SIZE, *, others: FakeOthers | None = None) -> AsyncIterator[Screen]:
    """Run a new app."""
    session, feed, admin = followed()
    app = TopApp(session, DeploymentQueries(admin, session), is_animated=False, switcher=others)
    async with app.run_test(size=size) as pilot:
        screen = Screen(app, pilot, feed, admin)
        await screen.settled()
        yield screen


class Shared:
    """One app for the tests of a module, because mounting takes longer than most tests."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self._app, self._pilot = app, pilot
        self._size = SIZE

    @asynccontextmanager
    async def __call__(
        self,
        size: tuple[int, int] = SIZE,
        *,
        readonly: bool = False,
        folder: Path | None = None,
        page: str = "overview",
        others: FakeOthers | None = None,
    ) -> AsyncIterator[Screen]:
        """Reset the app: a new session, the initial state, no dialog."""
        app = self._app
        while len(app.screen_stack) > 1:
            app.pop_screen()
        app.query_one(FilterBar).close()
        session, feed, admin = followed(readonly=readonly)
        app.switch_to(session, DeploymentQueries(admin, session))
        session.filter, app.switcher, app.folder = Filter(), others, folder or Path.cwd()
        app.choose(State(page=page))
        if size != self._size:
            self._size = size
            await Screen(app, self._pilot, feed, admin).resized(*size)
        screen = Screen(app, self._pilot, feed, admin)
        await screen.settled()
        yield screen


@asynccontextmanager
async def shared() -> AsyncIterator[Shared]:
    """Start the app of a module."""
    async with running() as screen:
        yield Shared(screen.app, screen.pilot)
