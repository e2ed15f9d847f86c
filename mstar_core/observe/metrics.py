"""Prometheus metrics of a deployment: the table of families, samples of them, and the text format.

The api counts its families with prometheus_client and sends their samples to the supervisor; the supervisor makes the
others and sends those that the api shows too. Both pages are rendered here. No label holds a client's text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from mstar_core.messages.telemetry import MetricSample

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the Prometheus text format."""

SUFFIXES: Final = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
"""Endings of a family's sample names, by kind. Creation times are not exported."""

SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
GAPS: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEPS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FACTORS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1, 1.2, 1.5, 2, 5, 10)

Kind = Literal["counter", "gauge", "histogram"]
Maker = Literal["api", "supervisor", "socket"]

Labelled = Mapping[Any, float | int | None]
"""Values by a tuple of label values; None is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric family. name: without the `_total` of a counter's samples. buckets: upper bounds of a histogram.

    maker: `api` is counted by the api, `supervisor` is made by the supervisor, and both pages show these two; `socket`
    is made by the supervisor and shown by the admin socket alone.
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


STEP_SECONDS, STEP_ROWS = "mstar_step_seconds", "mstar_step_rows"

_ALL: Final = (
    _api("counter", "mstar_requests", "Answered requests by route and error code (ok).", "route", "code"),
    _api("counter", "mstar_tokens", "Tokens read (prompt, cached) and generated (completion).", "kind"),
    _api("counter", "mstar_audio_seconds", "Seconds of audio generated."),
    _api("counter", "mstar_cancelled", "Cancelled requests by cause.", "cause"),
    _api("counter", "mstar_rejected", "Requests refused before admission, by code.", "code"),
    _api("gauge", "mstar_realtime_sessions", "Realtime sessions, those that wait for their client included."),
    _api("counter", "mstar_realtime_interrupts", "Answers of realtime sessions that speech interrupted."),
    _api("counter", "mstar_realtime_false_starts", "Detected speech of less than 0.2 s."),
    _api(
        "histogram",
        "mstar_realtime_first_audio_seconds",
        "Time from the detected end of speech to the first audio of its answer.",
        buckets=SECONDS,
    ),
    _api("counter", "mstar_late_messages", "Messages for requests that had ended."),
    _api(
        "histogram", "mstar_queue_seconds", "Time from arrival to admission, preprocessing included.", buckets=SECONDS
    ),
    _api("histogram", "mstar_ttft_seconds", "Time from arrival to the first output.", "modality", buckets=SECONDS),
    _api("histogram", "mstar_ttfa_seconds", "Time from arrival to the first audio.", buckets=SECONDS),
    _api("histogram", "mstar_inter_chunk_seconds", "Time between outputs of a request.", "modality", buckets=GAPS),
    _api("histogram", "mstar_stream_gap_seconds", "Delay of an audio chunk after its playback time.", buckets=GAPS),
    _api(
        "histogram",
        "mstar_real_time_factor",
        "Duration of a finished request per second of its audio.",
        buckets=FACTORS,
    ),
    _api("histogram", "mstar_request_seconds", "Time from arrival to end.", "route", buckets=SECONDS),
    _api(
        "counter",
        "mstar_request_attempts",
        "Further attempts of requests, by the kind of process whose death ended the one before.",
        "process",
    ),
    _api(
        "histogram",
        "mstar_request_pause_seconds",
        "Time from the death that ended an attempt to the first new output of the next one.",
        buckets=SECONDS,
    ),
    _api("gauge", "mstar_inflight", "Requests that run."),
    _api("gauge", "mstar_queue_depth", "Requests that wait for a slot."),
    _api("gauge", "mstar_pool_busy", "Preprocessing processes that are busy."),
    _api("gauge", "mstar_sessions", "Sessions of clients that have not ended."),
    _api("gauge", "mstar_session_media_bytes", "Bytes of decoded images that sessions keep."),
    _api(
        "counter",
        "mstar_session_images",
        "Images of requests of sessions: kept from an earlier one, or decoded.",
        "how",
    ),
    _both("gauge", "mstar_component_up", "1 if a process of the deployment is up, else 0.", "component"),
    _both("counter", "mstar_restarts", "Restarts of processes."),
    _both("counter", "mstar_transport_bytes", "Bytes of tensors that a process sent to others.", "component"),
    _both(
        "counter",
        "mstar_leftovers",
        "Requests that a process closed because their owner did not know them any more; more than 0 is a defect.",
        "component",
    ),
    _both("gauge", "mstar_kv_pages", "KV-cache pages of a node by state.", "node", "state"),
    _both("gauge", "mstar_batch_size", "Sequences or jobs in a node's last step, 0 when it is idle.", "node"),
    _both("histogram", STEP_SECONDS, "Compute of a node: the duration of each step.", "node", buckets=STEPS),
    _both("histogram", STEP_ROWS, "Sequences or jobs in a node's step.", "node", buckets=BATCHES),
    _both("counter", "mstar_preempted", "Preempted requests of a node.", "node"),
    _both(
        "gauge",
        "mstar_graph_steps",
        "Steps of a node since its start: replayed from a CUDA graph, or plain.",
        "node",
        "kind",
        "how",
    ),
    _both("gauge", "mstar_graphs", "CUDA graphs of a node: captured, or only planned so far.", "node", "state"),
    _both("gauge", "mstar_graph_bytes", "Device memory of a node's CUDA graphs.", "node"),
    _both(
        "gauge",
        "mstar_kernels_compiled",
        "Kernels that a worker compiled: ahead of its captures, at a launch of "
        "its start (missed), or while it served (late).",
        "component",
        "when",
    ),
    _socket("gauge", "mstar_state", "1 for the current state of the deployment.", "state"),
    _socket("gauge", "mstar_watchers", "Open watches of the admin socket."),
    _socket("gauge", "mstar_process_cores", "CPU use of a process, in cores.", "component", "host"),
    _socket("gauge", "mstar_process_resident_bytes", "Resident memory of a process.", "component", "host"),
    _socket("gauge", "mstar_node_queue", "Sequences and jobs that are ready to run.", "node", "rank"),
    _socket("gauge", "mstar_node_waiting", "Jobs that wait for a slot or pages.", "node", "rank"),
    _socket("gauge", "mstar_node_busy", "Share of time in steps.", "node", "rank"),
    _socket("gauge", "mstar_node_steps_per_second", "Steps per second.", "node", "rank"),
    _socket("gauge", "mstar_node_step_seconds", "Duration of a step, over the last 256.", "node", "rank", "percentile"),
    _socket("gauge", "mstar_node_pages", "KV-cache pages of a node on a rank by state.", "node", "rank", "state"),
    _socket("counter", "mstar_node_preempted", "Preempted requests of a node on a rank.", "node", "rank"),
    _socket("gauge", "mstar_rank_busy", "Share of time in steps.", "rank", "host"),
    _socket("gauge", "mstar_rank_requests", "Open requests on a rank.", "rank", "host"),
    _socket(
        "gauge",
        "mstar_rank_memory_bytes",
        "Memory of a rank on its device, and that of the device.",
        "rank",
        "host",
        "state",
    ),
    _socket(
        "gauge", "mstar_rank_given_back_bytes", "Device memory that sleeping nodes have given back.", "rank", "host"
    ),
    _socket("gauge", "mstar_rank_kept_bytes", "Host memory that sleeping nodes keep.", "rank", "host"),
    _socket("counter", "mstar_wakes", "Wakes of the deployment or of nodes."),
    _socket("gauge", "mstar_rank_shm_bytes", "Shared memory in use by a rank.", "rank", "host"),
    _socket("gauge", "mstar_group_epoch", "Starts of the tensor-parallel group of a rank.", "rank", "leader"),
    _socket("counter", "mstar_group_plans", "Frames of plans that a follower has carried out.", "rank"),
    _socket("gauge", "mstar_gpu_utilisation", "Share of time with a kernel running.", "gpu", "host"),
    _socket("gauge", "mstar_gpu_memory_bytes", "Memory of a GPU.", "gpu", "host", "state"),
    _socket("gauge", "mstar_gpu_power_watts", "Power draw of a GPU.", "gpu", "host"),
    _socket("gauge", "mstar_host_up", "1 if a host's agent reports, else 0.", "host"),
    _socket("gauge", "mstar_host_cores", "CPU use of a host, in cores.", "host"),
    _socket("gauge", "mstar_host_memory_bytes", "Memory of a host.", "host", "state"),
    _socket("gauge", "mstar_host_network_bytes_per_second", "Traffic of a host's interfaces.", "host", "direction"),
    _socket("gauge", "mstar_host_round_trip_seconds", "Time from the supervisor to a host's agent and back.", "host"),
    _socket("counter", "mstar_edge_items", "Items sent over an edge.", "edge", "source_rank", "into_rank"),
    _socket("counter", "mstar_edge_bytes", "Bytes sent over an edge.", "edge", "source_rank", "into_rank"),
    _socket(
        "gauge",
        "mstar_edge_transfer_seconds",
        "Mean transfer time of a message in the last second.",
        "edge",
        "source_rank",
        "into_rank",
    ),
)

FAMILIES: Final = {family.name: family for family in _ALL}
"""Families by name, in the order of docs/metrics.md."""


def made_by(*makers: Maker) -> list[Family]:
    """Return the families of these makers, in order."""
    return [family for family in _ALL if family.maker in makers]


# -- samples ------------------------------------------------------------------------------------------------------


def samples(name: str, values: Labelled) -> Iterator[MetricSample]:
    """Yield the samples of a counter or gauge. Raises KeyError for a name that is not in the table."""
    suffix = SUFFIXES[FAMILIES[name].kind][0]
    for labels, value in values.items():
        if value is not None:
            yield MetricSample(f"{name}{suffix}", list(labels), float(value))


def samples_of(metrics: Iterable[Metric]) -> Iterator[MetricSample]:
    """Yield the samples of prometheus_client's metrics, without creation times."""
    for metric in metrics:
        family = FAMILIES[metric.name]
        names = {f"{metric.name}{suffix}" for suffix in SUFFIXES[family.kind]}
        for sample in metric.samples:
            if sample.name in names:
                labels = [sample.labels[name] for name in _label_names(sample.name, family)]
                yield MetricSample(sample.name, labels, sample.value)


def exposition(families: Iterable[Family], samples: Iterable[MetricSample]) -> bytes:
    """Render these families in the Prometheus text format. Samples of other families are left out."""
    by_name: defaultdict[str, list[MetricSample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    lines: list[str] = []
    for family in families:
        shown = f"{family.name}_total" if family.kind == "counter" else family.name
        lines += [f"# HELP {shown} {family.doc}", f"# TYPE {shown} {family.kind}"]
        names = [f"{family.name}{suffix}" for suffix in SUFFIXES[family.kind]]
        lines += [_text(sample, family) for name in names for sample in by_name[name]]
    return ("\n".join(lines) + "\n").encode()


def _text(sample: MetricSample, family: Family) -> str:
    pairs = sorted(zip(_label_names(sample.name, family), sample.labels, strict=True))
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{sample.name}{{{labels}}} {_number(sample.value)}" if labels else f"{sample.name} {_number(sample.value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(float(value)), text)


def _label_names(sample: str, family: Family) -> tuple[str, ...]:
    return (*family.labels, "le") if sample.endswith("_bucket") else family.labels


# -- histograms of a node's steps ---------------------------------------------------------------------------------

_PREFIX: Final = {STEP_SECONDS: "took", STEP_ROWS: "batched"}
_SUM: Final = {STEP_SECONDS: "busy_s", STEP_ROWS: "rows"}
"""The reading that is the sum of all values."""


def _readings(family: str) -> list[str]:
    return [f"{_PREFIX[family]}_{index}" for index in range(len(FAMILIES[family].buckets) + 1)]


STEP_READINGS: Final = frozenset({*_SUM.values(), *_readings(STEP_SECONDS), *_readings(STEP_ROWS)})
"""Readings of a node that its histograms are made of."""


@dataclass(slots=True)
class StepHistogram:
    """Counts steps by duration or batch size. Owned by a node's statistics. counts: by upper bound, then those above.

    A worker sends the count of each bucket as a reading of the node (`took_0`, `took_1`, ...). It sends empty buckets
    too, because a count of its previous incarnation would stay otherwise.
    """

    family: str
    counts: list[int] = field(init=False)
    _bounds: tuple[float, ...] = field(init=False)
    _names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._bounds = FAMILIES[self.family].buckets
        self._names = _readings(self.family)
        self.counts = [0] * len(self._names)

    def add(self, value: float) -> None:
        """Count one step. A value equal to a bound belongs to that bucket."""
        self.counts[bisect_left(self._bounds, value)] += 1

    def values(self) -> dict[str, float]:
        """Return reading -> steps."""
        return {name: float(count) for name, count in zip(self._names, self.counts, strict=True)}


def step_samples(nodes: Mapping[str, Mapping[str, float]]) -> Iterator[MetricSample]:
    """Yield both histograms of steps. nodes: name -> reading -> value; a node without steps is left out."""
    for name in (STEP_SECONDS, STEP_ROWS):
        bounds = [*(_number(bound) for bound in FAMILIES[name].buckets), "+Inf"]
        for node, readings in nodes.items():
            within, buckets = 0.0, []
            for bound, reading in zip(bounds, _readings(name), strict=True):
                within += readings.get(reading, 0.0)
                buckets.append(MetricSample(f"{name}_bucket", [node, bound], within))
            if within:
                yield from buckets
                yield MetricSample(f"{name}_sum", [node], readings.get(_SUM[name], 0.0))
                yield MetricSample(f"{name}_count", [node], within)
