"""Prometheus metrics of the api. Owned by the service. Labels never contain client text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mstar_core.messages.telemetry import MetricSample, RequestNews
from mstar_core.observe.families import CONTENT_TYPE, FAMILIES
from mstar_core.observe.prometheus import Timeless, Told, samples_of
from mstar_core.observe.step_histograms import READINGS

__all__ = ["CONTENT_TYPE", "Metrics"]

TELL_S: Final = 1.0
"""Interval of reports to the supervisor."""


class Metrics:
    """Metrics of one api process. The registry is not global, so that several apis can run in one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._own = CollectorRegistry()
        self._told = Told()
        self._next_tell = 0.0
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

        def counter(name: str) -> Counter:
            family = FAMILIES[name]
            return Counter(name, family.doc, family.labels, registry=self._own)

        def gauge(name: str) -> Gauge:
            family = FAMILIES[name]
            return Gauge(name, family.doc, family.labels, registry=self._own)

        def histogram(name: str) -> Histogram:
            family = FAMILIES[name]
            return Histogram(name, family.doc, family.labels, buckets=family.buckets, registry=self._own)

        self.requests = counter("mstar_requests")
        self.tokens = counter("mstar_tokens")
        self.cancelled = counter("mstar_cancelled")
        self.rejected = counter("mstar_rejected")
        self.audio_seconds = counter("mstar_audio_seconds")
        self.late = counter("mstar_late_messages")
        self.queue_s = histogram("mstar_queue_seconds")
        self.ttft_s = histogram("mstar_ttft_seconds")
        self.ttfa_s = histogram("mstar_ttfa_seconds")
        self.chunk_gap_s = histogram("mstar_inter_chunk_seconds")
        self.stream_gap_s = histogram("mstar_stream_gap_seconds")
        self.real_time_factor = histogram("mstar_real_time_factor")
        self.request_s = histogram("mstar_request_seconds")
        self.inflight = gauge("mstar_inflight")
        self.queue_depth = gauge("mstar_queue_depth")
        self.pool_busy = gauge("mstar_pool_busy")
        self.component_up = Gauge(
            "mstar_component_up", FAMILIES["mstar_component_up"].doc, ("component",), registry=self.registry
        )
        self.registry.register(Timeless(self._own))
        self.registry.register(self._told)

    def ended(self, news: RequestNews) -> None:
        """Record the audio metrics of a finished request."""
        if news.ttfa_s is not None:
            self.ttfa_s.observe(news.ttfa_s)
        if news.state == "finished" and news.audio_s and news.started is not None and news.ended is not None:
            self.real_time_factor.observe((news.ended - news.started) / news.audio_s)

    def take_telemetry(self, values: Mapping[str, float]) -> None:
        """Store readings sent by the supervisor: `node.NAME.READING`, `component.NAME.READING`, `deployment.READING`.

        READING is `pages_STATE`, `KIND_HOW` (steps), or a key of _NODE, _COMPONENT or _DEPLOYMENT. Other readings are
        ignored.
        """
        for name, value in values.items():
            kind, _, rest = name.partition(".")
            who, _, what = rest.rpartition(".")
            if kind == "node" and who:
                self._node(who, what, value)
            elif kind == "component" and what in _COMPONENT:
                self._told.put(_COMPONENT[what], (who,), value)
            elif kind == "deployment" and what in _DEPLOYMENT:
                self._told.put(_DEPLOYMENT[what], (), value)

    def _node(self, node: str, what: str, value: float) -> None:
        if what in _NODE:
            self._told.put(_NODE[what], (node,), value)
        elif what in READINGS:
            self._told.put_step(node, what, value)
        elif what.startswith("pages_"):
            self._told.put("mstar_kv_pages", (node, what.removeprefix("pages_")), value)
        elif what.endswith(("_replayed", "_plain")):
            kind, _, how = what.partition("_")
            self._told.put("mstar_graph_steps", (node, kind, how), value)

    def news(self, now: float) -> list[MetricSample]:
        """Return the samples that changed since the last call, at most once per second."""
        if now < self._next_tell:
            return []
        self._next_tell = now + TELL_S
        changed = []
        for sample in samples_of(self._own.collect()):
            key = (sample.name, tuple(sample.labels))
            if self._last.get(key) != sample.value:
                self._last[key] = sample.value
                changed.append(sample)
        return changed

    def text(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        return generate_latest(self.registry)


_NODE: Final = {
    "batch_size": "mstar_batch_size",
    "preempted": "mstar_preempted",
    "graph_bytes": "mstar_graph_bytes",
}
_COMPONENT: Final = {"sent_bytes": "mstar_transport_bytes"}
_DEPLOYMENT: Final = {"restarts": "mstar_restarts"}
