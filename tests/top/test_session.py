"""Sessions: follow, pause, step back, record, replay, reconnect. Sockets are fakes."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mstar_core.conformance.clock import FakeClock
from mstar_core.errors import NotFound, Unreachable, UsageError
from mstar_core.observe.frames import BeatFrame, HelloFrame, encode
from mstarctl.client.store import Store
from mstarctl.top.data.feed import Feed, LogFeed
from mstarctl.top.data.recording import Recorder, Ring, read_recording
from mstarctl.top.data.session import LiveSession, ReplaySession
from mstarctl.top.data.view import NORMAL
from mstarctl.top.layout.header import header
from tests.top.models import qwen
from tests.top.streams import Simulation

PATIENCE_S = 60.0


class FakeAdmin:
    """A fake admin socket: each connection returns the next list of lines, then ends or stays open."""

    def __init__(self, *connections: list[bytes | Exception]) -> None:
        self.connections = list(connections)
        self.asked: list[dict[str, Any]] = []
        self.is_empty = threading.Event()
        self.closing = threading.Event()

    def raw_lines(self, path: str, **arguments: Any) -> Iterator[bytes]:
        self.asked.append({"path": path, **arguments})
        if not self.connections:
            self.is_empty.set()
            self.closing.wait(PATIENCE_S)
            raise Unreachable("nobody answers")
        for line in self.connections.pop(0):
            if isinstance(line, Exception):
                raise line
            yield line

    def lines(self, path: str, **arguments: Any) -> Iterator[dict[str, Any] | None]:
        yield {"from": "api", "line": '{"level": "INFO", "message": "hello"}'}
        yield None
        self.closing.wait(PATIENCE_S)


def told(seconds: float = 3.0, seed: int = 1) -> list[bytes]:
    """Return the lines of a watch."""
    return [encode(frame) for _, frame in Simulation(qwen(), seed=seed).frames(seconds)]


def live(admin: FakeAdmin, clock: FakeClock | None = None) -> LiveSession:
    """Return a session that has read all lines."""
    used = clock or FakeClock()
    session = LiveSession(Feed(admin, 4.0, clock=used), LogFeed(admin), clock=used)
    session.start()
    assert admin.is_empty.wait(PATIENCE_S)
    session.poll()
    return session


def end(admin: FakeAdmin, session: LiveSession) -> None:
    session.stop()
    admin.closing.set()


def test_a_watch_becomes_a_view() -> None:
    admin = FakeAdmin(list(told()))
    session = live(admin)
    view = session.view()
    assert view.store.is_synced and view.store.deployment.name == "qwen3_omni"
    assert len(view.store.requests) > 5
    assert admin.asked[0] == {"path": "/v1/watch", "hz": 4.0}  # without parts: all parts
    end(admin, session)


def test_a_paused_view_is_unchanged_while_frames_are_applied() -> None:
    admin = FakeAdmin(list(told(3)))
    session = live(admin)
    session.toggle_pause()
    before = session.view().store
    for frame in Simulation(qwen(), seed=1).hello():
        session._apply(encode(frame), frame)
    for frame in islice((f for _ in range(5) for f in _steps(session)), 5):
        session._apply(encode(frame), frame)
    view = session.view()
    assert (view.link.state, view.store.t, view.store.requests) == ("paused", before.t, before.requests)
    session.toggle_pause()
    assert session.view().link.state != "paused"
    end(admin, session)


def _steps(session: LiveSession) -> Iterator[Any]:
    yield BeatFrame(rev=session.store.rev + 1, t=session.store.t + 2)


def test_stepping_back_and_forward_shows_every_state() -> None:
    frames = [frame for _, frame in Simulation(qwen(), seed=2).frames(30)]
    admin = FakeAdmin([encode(frame) for frame in frames])
    session = live(admin)
    pictures = []
    store = Store()
    for frame in frames:
        store.apply(frame)
        if not isinstance(frame, HelloFrame):
            pictures.append((store.t, store.deployment.tokens_s, len(store.requests)))
    for back in range(1, len(pictures)):
        session.step(-1)
        shown = session.view().store
        assert (shown.t, shown.deployment.tokens_s, len(shown.requests)) == pictures[-1 - back]
    session.step(-5)
    assert session.view().store.t == pictures[0][0]
    session.skip(10.0)
    assert session.view().store.t == pictures[40][0] or session.view().store.t > pictures[0][0] + 9
    session.step(10_000)
    assert session.view().store.t == pictures[-1][0]
    assert session.view().link.behind == 0
    end(admin, session)


def test_the_ring_keeps_five_minutes_and_no_more_than_its_bytes() -> None:
    ring, store = Ring(span_s=60.0), Store()
    for _, frame in Simulation(qwen(), hz=1.0).frames(200):
        store.apply(frame)
        ring.add(encode(frame), store, is_whole=False)
    assert 60 <= store.t - ring.at(ring.oldest).t <= 80
    small = Ring(limit_bytes=200_000)
    for _, frame in Simulation(qwen()).frames(60):
        store.apply(frame)
        small.add(encode(frame), store, is_whole=False)
        assert small.size_bytes <= 200_000 or small.oldest == 0


def test_an_empty_ring_has_no_state() -> None:
    with pytest.raises(LookupError):
        Ring().at(0)


def test_a_broken_watch_is_stale_and_reconnects() -> None:
    clock = FakeClock()
    again = told(2, seed=4)
    admin = FakeAdmin([*told(1), Unreachable("gone")], [Unreachable("still gone")], list(again))
    session = live(admin, clock)
    assert session.view().store.is_synced
    assert [ask["path"] for ask in admin.asked] == ["/v1/watch"] * 4
    session.poll()
    assert session.view().link.state == "stale"
    end(admin, session)


def test_a_silent_watch_is_stale_after_three_heartbeats() -> None:
    clock = FakeClock()
    feed = Feed(FakeAdmin(), 4.0, clock=clock)
    feed._is_connected = True
    assert feed.state == ("live", "")
    clock.now += 7
    assert feed.state == ("stale", "no frame for 7 s")


@pytest.mark.parametrize("how", ["stopped", "failed: worker-0 was killed by SIGKILL"])
def test_a_deployment_that_ended_says_how(how: str) -> None:
    admin = FakeAdmin(list(told(2)))
    session = LiveSession(Feed(admin, 4.0, ending=lambda: how), LogFeed(admin))
    session.start()
    until = time.monotonic() + PATIENCE_S
    while session.view().link.state != "ended" and time.monotonic() < until:
        session.poll()
        time.sleep(0.01)
    assert session.view().link.why == how
    first = header(session.view(), 120, NORMAL)[0].plain
    assert f" {how.partition(':')[0]}" in first and "ready" not in first
    session.stop()


def test_a_gap_opens_a_new_watch() -> None:
    frames = told(3)
    admin = FakeAdmin([*frames[:4], *frames[6:]])
    session = live(admin)
    assert session.store.has_gap and session._feed._again.is_set()
    end(admin, session)


def test_a_deployment_of_a_newer_api_ends_the_session_with_a_hint() -> None:
    admin = FakeAdmin([encode(HelloFrame(api=3, min_api=2, boot="x"))])
    feed = Feed(admin, 4.0)
    feed.start()
    feed._thread.join(PATIENCE_S)
    with pytest.raises(UsageError) as caught:
        feed.take()
    assert caught.value.hint == "update mstarctl"


def test_logs_are_read_from_the_first_visit() -> None:
    admin = FakeAdmin(list(told(1)))
    session = live(admin)
    assert not list(session.view().logs)
    session.want_logs()
    deadline = threading.Event()
    for _ in range(1200):
        session.poll()
        if session.view().logs:
            break
        deadline.wait(0.05)
    (logged,) = session.view().logs
    assert (logged.source, logged.level, logged.message) == ("api", "INFO", "hello")
    end(admin, session)


# -- recordings ---------------------------------------------------------------------------------------------------


def test_a_replay_equals_the_recorded_session(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    frames = list(Simulation(qwen(), seed=5).frames(20))
    recorder = Recorder(path, "qwen3_omni", at=0.0)
    store = Store()
    for at, frame in frames:
        recorder.frame(at, encode(frame))
        store.apply(frame)
    recorder.answer(20.0, "/v1/requests/a/trace", {"spans": []})
    recorder.log(20.0, {"from": "api", "line": "plain"})
    recorder.close()
    session = ReplaySession(read_recording(path), clock=lambda: 0.0)
    session.start()
    session.skip(100.0)
    assert session.store.snapshot(events=50) == store.snapshot(events=50)
    assert session.answer("/v1/requests/a/trace") == {"spans": []}
    assert [logged.message for logged in session.view().logs] == ["plain"]
    session.skip(-100.0)
    assert session.answer("/v1/requests/a/trace") is None
    assert session.store.t < store.t


def test_a_replay_runs_with_the_clock_and_its_speed(tmp_path: Path) -> None:
    clock = FakeClock()
    session = ReplaySession(read_recording(recorded(tmp_path)), speed=2.0, clock=clock)
    session.start()
    first = session.view().store.t
    clock.now += 3.0
    session.poll()
    assert session.view().store.t - first == pytest.approx(6.0, abs=0.3)
    session.toggle_pause()
    clock.now += 3.0
    session.poll()
    assert session.view().store.t - first == pytest.approx(6.0, abs=0.3)
    assert session.faster(2.0) == "speed x4"
    session.toggle_pause()
    clock.now += 60
    session.poll()
    assert session.view().link.state == "ended"
    session.toggle_pause()
    assert session.view().store.t == first


def test_seeking_shows_the_same_state_as_playing(tmp_path: Path) -> None:
    recording = read_recording(recorded(tmp_path))
    played = ReplaySession(recording, clock=lambda: 0.0)
    played.start()
    pictures = {}
    for _ in recording.lines:
        pictures[played._index] = played.store.snapshot()
        played.step(1)
    for index in (3, 60, 7, 75, 2, 41):
        played.step(index - played._index)
        assert played.store.snapshot() == pictures[index]


def recorded(folder: Path) -> Path:
    path = folder / "r.gz"
    recorder = Recorder(path, "qwen3_omni", at=0.0)
    for at, frame in Simulation(qwen(), seed=6).frames(20):
        recorder.frame(at, encode(frame))
    recorder.close()
    return path


def test_an_incomplete_recording_plays_to_its_end(tmp_path: Path) -> None:
    whole = recorded(tmp_path)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    recording = read_recording(cut)
    assert recording.is_cut and 0 < len(recording.lines) < len(read_recording(whole).lines)


def test_other_files_are_not_recordings(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with gzip.open(tmp_path / "other.gz", "wt") as file:
        file.write("{}\n")
    with gzip.open(tmp_path / "future.gz", "wt") as file:
        file.write('{"mstar_recording": 99}\n')
    for name in ("text", "other.gz", "future.gz"):
        with pytest.raises(UsageError):
            read_recording(tmp_path / name)
    with pytest.raises(NotFound):
        read_recording(tmp_path / "nothing")


def test_a_recording_may_start_during_a_watch(tmp_path: Path) -> None:
    admin = FakeAdmin(list(told(3)))
    session = live(admin)
    assert session.toggle_recording(tmp_path / "mid.gz").startswith("recording into")
    assert session.view().link.is_recording
    assert session.toggle_recording(tmp_path / "mid.gz").startswith("recorded")
    replay = ReplaySession(read_recording(tmp_path / "mid.gz"), clock=lambda: 0.0)
    replay.start()
    assert replay.store.requests == session.store.requests
    with pytest.raises(UsageError, match="exists"):
        session.toggle_recording(tmp_path / "mid.gz")
    end(admin, session)
