"""Sessions, live or replayed: apply frames, keep history, pause, step back and record.

The screen calls `poll` ten times a second and draws `view()`; keys call the other methods.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from mstar_core.observe.filter import Filter
from mstar_core.observe.frames import BeatFrame, HelloFrame, SnapshotFrame
from mstarctl.client.store import Store
from mstarctl.top.data.feed import Feed, LogFeed
from mstarctl.top.data.history import History
from mstarctl.top.data.logs import Logged, merged, parse
from mstarctl.top.data.recording import Recorder, Recording, Ring
from mstarctl.top.data.view import Link, View
from mstarctl.top.drawing.glyphs import UNICODE, Glyphs

LOG_LINES: Final = 10_000
KEY_FRAMES: Final = 40
"""Number of frames between two states that a replay keeps for seeking."""


class LiveSession:
    """Follows a watch. Owned by the command, which stops it."""

    def __init__(
        self,
        feed: Feed,
        logs: LogFeed,
        *,
        glyphs: Glyphs = UNICODE,
        readonly: bool = False,
        clock: Callable[[], float] = time.monotonic,
        hz: float = 4.0,
    ) -> None:
        self.glyphs, self.filter, self.readonly = glyphs, Filter(), readonly
        self.store, self.history, self.ring = Store(), History(), Ring()
        self._feed, self._log_feed, self._clock = feed, logs, clock
        self._hz = hz
        self._logs: deque[Logged] = deque(maxlen=LOG_LINES)
        self._frozen: Store | None = None
        self._number = 0
        self._recorder: Recorder | None = None
        self._link_state: tuple[str, str] = ("connecting", "")
        self._seen = 0
        self._link_changes = 0
        self._is_restarting = False

    @property
    def is_live(self) -> bool:
        """Whether calls reach a deployment."""
        return True

    @property
    def changes(self) -> int:
        """Incremented when there is something new to draw."""
        return self._seen + self._link_changes

    def start(self) -> None:
        """Begin to read."""
        self._feed.start()

    def stop(self) -> None:
        """Stop the readers and end the recording."""
        self._feed.stop()
        self._log_feed.stop()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def poll(self) -> None:
        """Apply new frames and log lines. Raises a permanent failure of the reader."""
        before = self.store.changes
        for arrival in self._feed.take():
            self._apply(arrival.raw, arrival.frame)
            if self._recorder is not None:
                self._recorder.frame(arrival.at, arrival.raw)
        lines = self._log_feed.take()
        if self._recorder is not None:
            for facts in lines:
                self._recorder.log(self._clock(), facts)
        if lines:
            self._logs += merged([parse(str(f.get("from", "")), str(f.get("line", ""))) for f in lines])
            self._link_changes += 1
        if self.store.has_gap and not self._is_restarting:
            self._feed.restart()
        self._is_restarting = self.store.has_gap
        self._seen += self.store.changes - before
        state = self._feed.state
        if state != self._link_state:
            self._link_state = state
            self._link_changes += 1

    def view(self) -> View:
        """Return the data to draw now."""
        store = self.store if self._frozen is None else self._frozen
        state, why = self._link_state
        link = Link(state=state, hz=self.store.hz or self._hz, why=why, is_recording=self._recorder is not None)
        if self._frozen is not None:
            link = replace(
                link, state="paused", behind=max(0, self.store.rev - store.rev), back_s=self.store.t - store.t
            )
        return View(
            store=store,
            history=self.history,
            link=link,
            glyphs=self.glyphs,
            filter=self.filter,
            logs=self._logs,
            readonly=self.readonly or self.store.readonly,
        )

    def toggle_pause(self) -> None:
        """Freeze the view, or return to live. Frames are applied in both cases."""
        self._link_changes += 1
        if self._frozen is not None:
            self._frozen = None
        else:
            self._frozen = self.store.copy()
            self._number = self.ring.newest

    def step(self, frames: int) -> None:
        """Step some states forward or back; pauses first."""
        if self._frozen is None:
            self.toggle_pause()
        self._show(self._number + frames)

    def skip(self, seconds: float) -> None:
        """Step about so many seconds forward or back; pauses first."""
        if self._frozen is None:
            self.toggle_pause()
        step = max(1, round(abs(seconds) * (self.store.hz or self._hz)))
        self._show(self._number + (step if seconds > 0 else -step))

    def faster(self, factor: float) -> str:
        """Multiply the frame rate of the watch, within 0.1 to 10 per second. Returns a notice."""
        self._hz = min(10.0, max(0.1, round(self._hz * factor, 2)))
        self._feed.set_rate(self._hz)
        return f"requesting {self._hz:g} frames per second"

    def want_logs(self) -> None:
        """Start to read the logs."""
        self._log_feed.start()

    def answer(self, path: str) -> Any:
        """Return None: answers come from the deployment."""
        return None

    def note_answer(self, path: str, body: Any) -> None:
        """Add an answer to the recording."""
        if self._recorder is not None:
            self._recorder.answer(self._clock(), path, body)

    def toggle_recording(self, path: Path) -> str:
        """Start a recording with the current state, or end it. Raises MstarError if the file cannot be written."""
        self._link_changes += 1
        if self._recorder is not None:
            written = self._recorder.path
            self._recorder.close()
            self._recorder = None
            return f"recorded {written}"
        self._recorder = Recorder(path, self.store.deployment.name)
        if self.store.is_synced:
            self._recorder.begin(self._clock(), self.store)
        return f"recording into {path}"

    def _apply(self, raw: bytes, frame: Any) -> None:
        if isinstance(frame, HelloFrame) and frame.boot != self.store.boot:
            self.ring = Ring()
            self._frozen = None
        self.store.apply(frame)
        self.history.note(self.store)
        if not isinstance(frame, BeatFrame | HelloFrame):
            self.ring.add(raw, self.store, is_whole=isinstance(frame, SnapshotFrame))

    def _show(self, number: int) -> None:
        self._link_changes += 1
        if self.ring.newest < 0:
            return
        self._number = min(max(number, self.ring.oldest), self.ring.newest)
        self._frozen = self.ring.at(self._number)


class ReplaySession:
    """Plays a recording at `speed` times the clock, until it is paused."""

    def __init__(
        self,
        recording: Recording,
        *,
        speed: float = 1.0,
        glyphs: Glyphs = UNICODE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.glyphs, self.filter, self.readonly = glyphs, Filter(), True
        self.recording = recording
        self.store, self.history = Store(), History()
        self._speed, self._clock = speed, clock
        self._at, self._before = 0.0, clock()
        self._index = 0
        self._keys: list[tuple[int, Store]] = []
        self._lines: list[Logged] = []
        self._line_places: list[int] = []
        self._answers: list[tuple[int, str, Any]] = []
        self._known = 0
        self._is_paused = False
        self._moves = 0

    @property
    def is_live(self) -> bool:
        return False

    @property
    def changes(self) -> int:
        return self._moves

    def start(self) -> None:
        """Show the first state."""
        self._before = self._clock()
        self._go(bisect_right(self.recording.times, 0.0))

    def stop(self) -> None:
        """Do nothing: nothing is open."""

    def poll(self) -> None:
        """Play up to the current time."""
        now = self._clock()
        if not self._is_paused:
            self._at = min(self.recording.length_s, self._at + (now - self._before) * self._speed)
            self._go(bisect_right(self.recording.times, self._at))
        self._before = now

    def view(self) -> View:
        """Return the data to draw now."""
        length = self.recording.length_s
        progress = self._at / length if length else 1.0
        state = "paused" if self._is_paused else "ended" if self._index >= len(self.recording.lines) else "replay"
        behind = self._at if state == "paused" else 0.0
        why = "the recording is incomplete" if self.recording.is_cut else "end of the recording"
        return View(
            store=self.store,
            history=self.history,
            link=Link(
                state=state,
                hz=self.store.hz,
                speed=self._speed,
                progress=progress,
                why=why,
                back_s=length - behind if state == "paused" else 0.0,
                behind=len(self.recording.lines) - self._index,
            ),
            glyphs=self.glyphs,
            filter=self.filter,
            logs=self._lines[: bisect_left(self._line_places, self._index)],
            readonly=True,
        )

    def toggle_pause(self) -> None:
        """Pause or continue; at the end, start again."""
        if not self._is_paused and self._index >= len(self.recording.lines):
            self._seek(0.0)
            return
        self._is_paused = not self._is_paused
        self._moves += 1

    def step(self, frames: int) -> None:
        """Step some entries forward or back; pauses first."""
        self._is_paused = True
        frame = min(max(self._index + frames, 1), len(self.recording.lines))
        self._at = self.recording.times[frame - 1]
        self._go(frame)
        self._moves += 1

    def skip(self, seconds: float) -> None:
        """Seek some seconds forward or back."""
        self._seek(self._at + seconds)

    def faster(self, factor: float) -> str:
        """Multiply the speed, within 1/16 to 64. Returns a notice."""
        self._speed = min(64.0, max(1 / 16, self._speed * factor))
        self._moves += 1
        return f"speed x{self._speed:g}"

    def want_logs(self) -> None:
        """Do nothing: logs are part of the recording."""

    def answer(self, path: str) -> Any:
        """Return the newest answer recorded for a read up to now, None without one."""
        return next((body for index, of, body in reversed(self._answers) if of == path and index < self._index), None)

    def note_answer(self, path: str, body: Any) -> None:
        """Do nothing: a replay cannot be recorded."""

    def toggle_recording(self, path: Path) -> str:
        """Return a notice: a replay cannot be recorded."""
        return "a replay cannot be recorded"

    def _seek(self, at: float) -> None:
        self._at = min(max(0.0, at), self.recording.length_s)
        self._go(bisect_right(self.recording.times, self._at))
        self._moves += 1

    def _go(self, frame: int) -> None:
        """Show the state after `wanted` entries."""
        if frame == self._index:
            return
        if frame < self._index:
            index, store = next((key for key in reversed(self._keys) if key[0] <= frame), (0, Store()))
            self._index, self.store = index, store.copy()
        while self._index < frame:
            self._next()
        self._moves += 1

    def _next(self) -> None:
        entry = self.recording.entry(self._index)
        is_new = self._index >= self._known
        if entry.frame is not None:
            self.store.apply(entry.frame)
            self.history.note(self.store)
        if is_new and entry.log is not None:
            self._lines.append(parse(str(entry.log.get("from", "")), str(entry.log.get("line", ""))))
            self._line_places.append(self._index)
        if is_new and entry.answer is not None:
            self._answers.append((self._index, str(entry.answer.get("path", "")), entry.answer.get("body")))
        self._index += 1
        self._known = max(self._known, self._index)
        if is_new and self._index % KEY_FRAMES == 0:
            self._keys.append((self._index, self.store.copy()))


Session: TypeAlias = LiveSession | ReplaySession
