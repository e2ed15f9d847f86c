"""Every Prometheus family that a deployment exports: name, type, labels, meaning. Read by api, admin and docs.

No label holds a client's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text."""

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEPS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FACTORS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1, 1.2, 1.5, 2, 5, 10)

Kind = Literal["counter", "gauge", "histogram"]
Maker = Literal["api", "supervisor", "socket"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """name: as queries begin; a counter's samples end in `_total`. buckets: upper bounds of a histogram.

    maker: who makes the figure. `api`: the api counts it and tells the supervisor, and both show it; `supervisor`: it
    is made there and told to the api, and both show it; `socket`: only the admin socket shows it.
    """

    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    maker: Maker


def _api(kind: Kind, name: str, doc: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
    return Family(name=name, kind=kind, doc=doc, labels=labels, buckets=buckets, maker="api")


def _both(kind: Kind, name: str, doc: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
    return Family(name=name, kind=kind, doc=doc, labels=labels, buckets=buckets, maker="supervisor")


def _socket(kind: Kind, name: str, doc: str, *labels: str) -> Family:
    return Family(name=name, kind=kind, doc=doc, labels=labels, maker="socket")


_ALL: Final = (
    _api("counter", "mstar_requests", "Answered requests by route and error code (ok).", "route", "code"),
    _api("counter", "mstar_tokens", "Tokens read (prompt, cached) and made (completion).", "kind"),
    _api("counter", "mstar_audio_seconds", "Seconds of sound made."),
    _api("counter", "mstar_cancelled", "Requests cancelled, by cause.", "cause"),
    _api("counter", "mstar_rejected", "Requests refused before they ran, by code.", "code"),
    _api("counter", "mstar_late_messages", "Messages for requests that had ended."),
    _api("histogram", "mstar_queue_seconds", "From arrival to the place among those that run, input made ready.",
         buckets=SECONDS),
    _api("histogram", "mstar_ttft_seconds", "From arrival to the first output.", "modality", buckets=SECONDS),
    _api("histogram", "mstar_ttfa_seconds", "From arrival to the first sound.", buckets=SECONDS),
    _api("histogram", "mstar_inter_chunk_seconds", "Between outputs of a request.", "modality", buckets=GAPS),
    _api("histogram", "mstar_stream_gap_seconds", "How much later than its playback an audio chunk came.",
         buckets=GAPS),
    _api("histogram", "mstar_real_time_factor", "Seconds that a finished request took per second of its sound.",
         buckets=FACTORS),
    _api("histogram", "mstar_request_seconds", "From arrival to end.", "route", buckets=SECONDS),
    _api("gauge", "mstar_inflight", "Requests that run."),
    _api("gauge", "mstar_queue_depth", "Requests that wait for a slot."),
    _api("gauge", "mstar_pool_busy", "Pool processes that work."),
    _both("gauge", "mstar_component_up", "Whether a process of the deployment is there.", "component"),
    _both("counter", "mstar_restarts", "Restarts of processes."),
    _both("counter", "mstar_transport_bytes", "Bytes of tensors that a process handed to others.", "component"),
    _both("gauge", "mstar_kv_pages", "Pages of a node's cache by state.", "node", "state"),
    _both("gauge", "mstar_batch_size", "Rows of a node's last batch.", "node"),
    _both("histogram", "mstar_step_seconds", "Time of a node's step, from launch to result.", "node", buckets=STEPS),
    _both("histogram", "mstar_step_rows", "Rows of a node's step: its batch.", "node", buckets=BATCHES),
    _both("counter", "mstar_preempted", "Requests of a node whose pages were taken.", "node"),
    _both("gauge", "mstar_graph_steps", "Steps of a node since its start: replayed from a graph, or plain.", "node",
          "kind", "how"),
    _both("gauge", "mstar_graph_bytes", "Device memory that went with a node's graphs.", "node"),
    _socket("gauge", "mstar_state", "1 for the state of the deployment.", "state"),
    _socket("gauge", "mstar_watchers", "Readers of the watch."),
    _socket("gauge", "mstar_process_cores", "Share of one CPU core.", "component"),
    _socket("gauge", "mstar_process_resident_bytes", "Memory of a process.", "component"),
    _socket("gauge", "mstar_node_queue", "Rows that could run now.", "node", "rank"),
    _socket("gauge", "mstar_node_waiting", "Jobs without a slot or pages.", "node", "rank"),
    _socket("gauge", "mstar_node_busy", "Share of time in steps.", "node", "rank"),
    _socket("gauge", "mstar_node_steps_per_second", "Steps a second.", "node", "rank"),
    _socket("gauge", "mstar_node_step_seconds", "Time of a step, of the last 256.", "node", "rank", "percentile"),
    _socket("gauge", "mstar_node_pages", "Pages of a node's cache on a rank by state.", "node", "rank", "state"),
    _socket("counter", "mstar_node_preempted", "Requests whose pages were taken.", "node", "rank"),
    _socket("gauge", "mstar_rank_busy", "Share of time in steps.", "rank"),
    _socket("gauge", "mstar_rank_requests", "Requests open on a rank.", "rank"),
    _socket("gauge", "mstar_rank_memory_bytes", "Memory of a rank on its device, and that of the device.", "rank",
            "state"),
    _socket("gauge", "mstar_rank_shm_bytes", "Shared memory in use by a rank.", "rank"),
    _socket("gauge", "mstar_gpu_utilisation", "Share of time with a kernel running.", "gpu"),
    _socket("gauge", "mstar_gpu_memory_bytes", "Memory of a GPU.", "gpu", "state"),
    _socket("gauge", "mstar_gpu_power_watts", "Power of a GPU.", "gpu"),
    _socket("counter", "mstar_edge_items", "Items that went over an edge.", "edge", "source_rank", "into_rank"),
    _socket("counter", "mstar_edge_bytes", "Bytes that went over an edge.", "edge", "source_rank", "into_rank"),
    _socket("gauge", "mstar_edge_transfer_seconds", "Mean way of a message in the last second.", "edge",
            "source_rank", "into_rank"),
)  # fmt: skip

FAMILIES: Final = {family.name: family for family in _ALL}
"""By name, in the order in which they are shown."""


def made_by(maker: Maker) -> list[Family]:
    """Families of one maker, in order."""
    return [family for family in _ALL if family.maker == maker]
