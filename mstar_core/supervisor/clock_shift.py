"""Times of processes on other hosts, shifted to the supervisor's monotonic clock."""

from __future__ import annotations

from typing import Final

import msgspec

from mstar_core.messages.life import Telemetry

WINDOW_S: Final = 60.0
"""Time over which the least delay counts. Clocks of two hosts drift by milliseconds in it."""


class ClockShift:
    """Difference between the clock of a process and the supervisor's. Owned by the supervisor, one for each life.

    The message that was fastest on its way shows it best: what remains is the time of that way.
    """

    def __init__(self) -> None:
        self._begun: float | None = None
        self._least = self._before = float("inf")

    def shifted(self, telemetry: Telemetry, now: float) -> Telemetry:
        """Return the message with times of the supervisor's clock. now: when it came."""
        by = self._note(now, now - telemetry.at)

        def moved(time: float | None) -> float | None:
            return None if time is None else time + by

        requests = [
            msgspec.structs.replace(news, started=moved(news.started), ended=moved(news.ended))
            for news in telemetry.requests
        ]
        spans = [msgspec.structs.replace(span, start=span.start + by, end=span.end + by) for span in telemetry.spans]
        sessions = telemetry.sessions
        if sessions is not None:
            sessions = [
                msgspec.structs.replace(news, began=news.began + by, used=moved(news.used)) for news in sessions
            ]
        moved_times = {"at": telemetry.at + by, "requests": requests, "spans": spans, "sessions": sessions}
        return msgspec.structs.replace(telemetry, **moved_times)

    def _note(self, now: float, difference: float) -> float:
        """Note one difference between the clocks, and return the least of this window and the one before."""
        if self._begun is None or now >= self._begun + WINDOW_S:
            self._begun, self._before, self._least = now, self._least, difference
        self._least = min(self._least, difference)
        return min(self._least, self._before)
