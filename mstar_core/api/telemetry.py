"""Request telemetry for the supervisor: requests, modalities, times, audio, outcomes. Contains no client text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.plugin.surface import EVENTS

if TYPE_CHECKING:
    from mstar_core.api.parse.params import ParsedRequest
    from mstar_core.api.requests.registry import LiveRequest

STATES: Final = {"preprocessing": "prepare", "queued": "queue", "running": "run", "resuming": "resume"}
PREPARE: Final = "prepare"
ADMISSION: Final = "admission"
RESUME: Final = "resume"
"""Names of the api's steps in spans, used like node names."""

CONNECTIONS: Final = ("realtime", "realtime_call", "robot_policy", "robot_policy_root")
"""Routes whose connections carry many requests, named by the connection's id, `-` and a number."""

PROGRESS_S: Final = 0.5
"""Interval of progress reports of a running request; one costs as much CPU time as sending a chunk."""

MESSAGE_CHARS: Final = 300
PENDING: Final = 4096
"""Limit of finished requests, and of spans, kept until the next batch."""


@dataclass(slots=True)
class RequestTelemetry:
    """Telemetry of the requests of this process. Owned by the service; the link sends it.

    counts: requests finished, failed, cancelled and refused. why: what queued requests wait for. on_end: called for
    each finished request.
    """

    clock: Callable[[], float] = time.monotonic
    why: Callable[[], str] = str
    on_end: Callable[[RequestNews], None] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    _open: dict[int, LiveRequest] = field(default_factory=dict)
    _ended: list[RequestNews] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _keys: int = 0

    def opened(self, live: LiveRequest, call: ParsedRequest) -> None:
        """Start to track a request."""
        live.inputs = list(dict.fromkeys(modality for modality, _ in call.order)) or [p.modality for p in call.media]
        live.outputs = [kind for kind in call.outputs if kind not in EVENTS]
        live.parent = call.parent or call.group or _connection(live)
        if call.loop is not None:
            live.period_ms, live.skipped_ticks = call.loop.period_ms, call.loop.skipped_ticks
        self._open[live.first_handle] = live

    def prepared(self, live: LiveRequest) -> None:
        """Record that the inputs are ready and the request is queued."""
        live.prepared = self.clock()
        self._span(live, "compute", PREPARE, live.started, live.prepared)

    def admitted(self, live: LiveRequest) -> None:
        """Record that the request got a slot."""
        live.admitted = self.clock()
        self._span(live, "queue", ADMISSION, live.prepared, live.admitted)

    def resumed(self, live: LiveRequest, start: float, end: float) -> None:
        """Record a pause between two attempts."""
        self._span(live, "wait", RESUME, start, end)

    def ended(self, live: LiveRequest, status: str, code: str, message: str = "") -> None:
        """Record the end of a request. status: finished, failed or cancelled; code, message: of its error."""
        self.counts[status] += 1
        if self._open.pop(live.first_handle, None) is None:
            return
        usage = live.result.get("usage", {})
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens")
        # The report is complete, because a short request may not have been reported before.
        news = self._news(
            live,
            status,
            ended=self.clock(),
            error=code,
            message=message[:MESSAGE_CHARS] or None,
            tokens=usage.get("completion_tokens"),
            cached=cached,
        )
        if self.on_end is not None:
            self.on_end(news)
        if len(self._ended) < PENDING:
            self._ended.append(news)
        else:
            self.dropped += 1

    def take(self) -> tuple[list[RequestNews], list[Span]]:
        """Return news and spans since the last call, without requests that did not change."""
        news, self._ended = self._ended, []
        spans, self._spans = self._spans, []
        now = self.clock()
        for live in self._open.values():
            state = STATES.get(live.state, live.state)
            if not _is_due(live, state, now):
                continue
            state_news, live.due = self._news(live, state), now + PROGRESS_S
            if state_news != live.reported:
                live.reported = state_news
                news.append(state_news)
        return news, spans

    def _news(
        self,
        live: LiveRequest,
        state: str,
        *,
        ended: float | None = None,
        error: str | None = None,
        message: str | None = None,
        tokens: int | None = None,
        cached: int | None = None,
    ) -> RequestNews:
        encoder = live.encoder
        first = None if encoder is None else encoder.first_at
        sound = None if encoder is None else encoder.first_sound_at
        return RequestNews(
            handle=live.first_handle,
            id=live.request_id,
            parent=live.parent or None,
            route=live.route,
            inputs=live.inputs,
            outputs=live.outputs,
            period_ms=live.period_ms,
            skipped_ticks=live.skipped_ticks,
            state=state,
            started=live.started,
            ended=ended,
            error=error,
            message=message,
            ttft_s=None if first is None else round(first - live.started, 6),
            ttfa_s=None if sound is None else round(sound - live.started, 6),
            audio_s=None if encoder is None or not encoder.samples else round(encoder.audio_seconds, 4),
            audio_in_s=round(live.heard_s, 4) or None,
            images=None if encoder is None else encoder.images or None,
            video_s=None if encoder is None else round(encoder.video_seconds, 4) or None,
            prompt_tokens=live.prompt_tokens or None,
            cached_tokens=cached,
            tokens=tokens,
            why=self._why(live, state),
            **_attempts(live),
        )

    def _span(self, live: LiveRequest, kind: str, node: str, start: float, end: float) -> None:
        self._keys += 1
        if len(self._spans) < PENDING:
            self._spans.append(Span(self._keys, live.first_handle, kind, node, "", start, end))
        else:
            self.dropped += 1

    def _why(self, live: LiveRequest, state: str) -> str:
        if state != "resume":
            return self.why() if state == "queue" else ""
        lost = [] if live.record is None else live.record.lost
        return f"{lost[-1].lost} died" if lost else "no worker is ready"


def _connection(live: LiveRequest) -> str:
    """Return the id of the connection on which a request came as one of many, empty for a request of its own."""
    return live.request_id.rpartition("-")[0] if live.route in CONNECTIONS else ""


def _attempts(live: LiveRequest) -> dict[str, Any]:
    """Return the fields of a report about attempts; none before the first loss."""
    if live.handle == live.first_handle or live.record is None:
        return {}
    attempts = live.record.attempts
    return {
        "current": live.handle,
        "attempts": max(1, len(attempts)),
        "pauses_s": [round(attempt.pause_s, 4) for attempt in attempts if attempt.pause_s is not None],
        "causes": [f"{attempt.lost}: {attempt.cause}" for attempt in live.record.lost],
    }


def _is_due(live: LiveRequest, state: str, now: float) -> bool:
    """Return whether a request may have changed since the last report."""
    reported, encoder = live.reported, live.encoder
    if reported is None or reported.state != state:
        return True
    if encoder is None:
        return False  # most requests of a long queue: nothing can have changed
    is_first = reported.ttft_s is None and encoder.first_at is not None
    return is_first or (reported.ttfa_s is None and encoder.first_sound_at is not None) or now >= live.due
