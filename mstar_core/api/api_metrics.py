"""Prometheus metrics of the api. Owned by the service. Labels never contain client text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mstar_core.messages.telemetry import MetricSample, RequestNews
from mstar_core.observe.metrics import CONTENT_TYPE, FAMILIES, exposition, made_by, samples, samples_of

__all__ = ["CONTENT_TYPE", "Metrics"]

T = TypeVar("T")
REPORT_S: Final = 1.0
"""Interval between reports to the supervisor."""


class Metrics:
    """Counts the api's families, and keeps samples of the supervisor's. Each api has a registry of its own.

    component_up: (process,) -> 1 while it is connected, else 0.
    """

    def __init__(self) -> None:
        self.component_up: dict[tuple[str], int] = {}
        self._own = CollectorRegistry()
        self._remote: dict[tuple[str, tuple[str, ...]], MetricSample] = {}
        self._next_report = 0.0
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

        def metric(kind: Callable[..., T], name: str) -> T:
            family = FAMILIES[name]
            buckets = {"buckets": family.buckets} if family.buckets else {}
            return kind(name, family.doc, family.labels, registry=self._own, **buckets)

        self.requests = metric(Counter, "mstar_requests")
        self.tokens = metric(Counter, "mstar_tokens")
        self.cancelled = metric(Counter, "mstar_cancelled")
        self.rejected = metric(Counter, "mstar_rejected")
        self.audio_seconds = metric(Counter, "mstar_audio_seconds")
        self.late = metric(Counter, "mstar_late_messages")
        self.queue_s = metric(Histogram, "mstar_queue_seconds")
        self.ttft_s = metric(Histogram, "mstar_ttft_seconds")
        self.ttfa_s = metric(Histogram, "mstar_ttfa_seconds")
        self.chunk_gap_s = metric(Histogram, "mstar_inter_chunk_seconds")
        self.stream_gap_s = metric(Histogram, "mstar_stream_gap_seconds")
        self.real_time_factor = metric(Histogram, "mstar_real_time_factor")
        self.request_s = metric(Histogram, "mstar_request_seconds")
        self.attempts = metric(Counter, "mstar_request_attempts")
        self.pause_s = metric(Histogram, "mstar_request_pause_seconds")
        self.realtime_first_audio_s = metric(Histogram, "mstar_realtime_first_audio_seconds")
        self.realtime_interrupts = metric(Counter, "mstar_realtime_interrupts")
        self.realtime_false_starts = metric(Counter, "mstar_realtime_false_starts")
        self.realtime_sessions = metric(Gauge, "mstar_realtime_sessions")
        self.inflight = metric(Gauge, "mstar_inflight")
        self.queue_depth = metric(Gauge, "mstar_queue_depth")
        self.pool_busy = metric(Gauge, "mstar_pool_busy")
        self.sessions = metric(Gauge, "mstar_sessions")
        self.session_media_bytes = metric(Gauge, "mstar_session_media_bytes")
        self.session_images = metric(Counter, "mstar_session_images")

    def count_tokens(self, usage: Mapping[str, Any]) -> None:
        """Count the tokens of a finished request."""
        self.tokens.labels("prompt").inc(usage["prompt_tokens"])
        self.tokens.labels("completion").inc(usage["completion_tokens"])
        self.tokens.labels("cached").inc(usage["prompt_tokens_details"]["cached_tokens"])

    def ended(self, news: RequestNews) -> None:
        """Record the audio metrics of a finished request."""
        if news.ttfa_s is not None:
            self.ttfa_s.observe(news.ttfa_s)
        if news.state == "finished" and news.audio_s and news.started is not None and news.ended is not None:
            self.real_time_factor.observe((news.ended - news.started) / news.audio_s)

    def captures(self) -> dict[str, dict[str, int]]:
        """Return the numbers of CUDA graphs of each node that has any: `captured` and `planned`."""
        found: dict[str, dict[str, int]] = {}
        for sample in self._remote.values():
            if sample.name == "mstar_graphs":
                node, state = sample.labels
                found.setdefault(node, {})[state] = int(sample.value)
        return {node: counts for node, counts in sorted(found.items()) if any(counts.values())}

    def take_samples(self, received: Iterable[MetricSample]) -> None:
        """Keep the newest samples of the families that the supervisor makes."""
        self._remote.update(((sample.name, tuple(sample.labels)), sample) for sample in received)

    def news(self, now: float) -> list[MetricSample]:
        """Return the api's samples that changed since the last report, at most once a second."""
        if now < self._next_report:
            return []
        self._next_report = now + REPORT_S
        changed = []
        for sample in samples_of(self._own.collect()):
            key = (sample.name, tuple(sample.labels))
            if self._last.get(key) != sample.value:
                self._last[key] = sample.value
                changed.append(sample)
        return changed

    def text(self) -> bytes:
        """Render all series in the Prometheus text format."""
        shown = [*samples_of(self._own.collect()), *samples("mstar_component_up", self.component_up)]
        return exposition(made_by("api", "supervisor"), [*shown, *self._remote.values()])
