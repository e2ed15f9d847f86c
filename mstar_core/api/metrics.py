"""The api's Prometheus series. Owned by the service; no label ever holds a client's text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry per api, so that two in one process (tests) do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(name, doc, labels, registry=self.registry)

        def gauge(name: str, doc: str, *labels: str) -> Gauge:
            return Gauge(name, doc, labels, registry=self.registry)

        def histogram(name: str, doc: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(name, doc, labels, buckets=buckets, registry=self.registry)

        self.requests = counter(
            "mstar_requests_total", "Answered requests by route and error code (ok).", "route", "code"
        )
        self.tokens = counter("mstar_tokens_total", "Tokens read (prompt, cached) and made (completion).", "kind")
        self.cancelled = counter("mstar_cancelled_total", "Requests cancelled, by cause.", "cause")
        self.rejected = counter("mstar_rejected_total", "Requests refused before they ran, by code.", "code")
        self.audio_seconds = counter("mstar_audio_seconds_total", "Seconds of sound made.")
        self.late = counter("mstar_late_messages_total", "Messages for requests that had ended.")
        self.queue_s = histogram("mstar_queue_seconds", "Wait for a slot.")
        self.ttft_s = histogram("mstar_ttft_seconds", "From arrival to the first output.", "modality")
        self.chunk_gap_s = histogram(
            "mstar_inter_chunk_seconds", "Between outputs of a request.", "modality", buckets=GAPS
        )
        self.request_s = histogram("mstar_request_seconds", "From arrival to end.", "route")
        self.stream_gap_s = histogram(
            "mstar_stream_gap_seconds", "How much later than its playback an audio chunk came.", buckets=GAPS
        )
        self.inflight = gauge("mstar_inflight", "Requests that run.")
        self.queue_depth = gauge("mstar_queue_depth", "Requests that wait for a slot.")
        self.kv_pages = gauge("mstar_kv_pages", "Pages of a node's cache by state.", "node", "state")
        self.batch_size = gauge("mstar_batch_size", "Rows of a node's last batch.", "node")
        self.graph_steps = gauge(
            "mstar_graph_steps",
            "Steps of a node since its start: replayed from a graph, or plain.",
            "node",
            "kind",
            "how",
        )
        self.graph_bytes = gauge("mstar_graph_bytes", "Device memory that went with a node's graphs.", "node")
        self.pool_busy = gauge("mstar_pool_busy", "Pool processes that work.")
        self.component_up = gauge("mstar_component_up", "Whether a process of the deployment is there.", "component")

    def take_telemetry(self, values: Mapping[str, float]) -> None:
        """Set gauges from `node.NAME.` with `pages_STATE`, `batch_size`, `KIND_HOW` (of steps) or `graph_bytes`."""
        for name, value in values.items():
            head, _, rest = name.partition(".")
            node, _, what = rest.rpartition(".")
            if head != "node" or not node:
                continue
            if what.startswith("pages_"):
                self.kv_pages.labels(node, what.removeprefix("pages_")).set(value)
            elif what == "batch_size":
                self.batch_size.labels(node).set(value)
            elif what == "graph_bytes":
                self.graph_bytes.labels(node).set(value)
            elif what.endswith(("_replayed", "_plain")):
                kind, _, how = what.partition("_")
                self.graph_steps.labels(node, kind, how).set(value)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
