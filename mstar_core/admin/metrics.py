"""Prometheus text of the admin socket, made when it is asked for: the api's names, and series per rank, node and edge.

Gauges are read from the hub; what only counts up is counted here, as requests end. No label holds a client's text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from mstar_core.observe.frames import Node, Request
from mstar_core.observe.store import Store

if TYPE_CHECKING:
    from mstar_core.observe.hub import Hub
    from mstar_core.observe.request_log import Known

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class View(Protocol):
    """What is read of the supervisor."""

    hub: Hub
    values: dict[str, float]
    restarts: int
    state: str


class Histogram:
    """Counts in buckets by one label, as the exposition wants them: cumulative."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums: Counter[str] = Counter()

    def add(self, label: str, value: float) -> None:
        """Note a value in seconds."""
        self._counts.setdefault(label, [0] * (len(SECONDS) + 1))[bisect_left(SECONDS, value)] += 1
        self._sums[label] += value  # type: ignore[assignment]  # a Counter adds floats too

    def samples(self) -> Iterator[tuple[str, list[tuple[str, float]], float]]:
        """(label, cumulative buckets, sum)."""
        for label, counts in self._counts.items():
            total, buckets = 0, []
            for bound, count in zip((*SECONDS, float("inf")), counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
            yield label, buckets, float(self._sums[label])


class Totals:
    """What is counted as requests end. Owned by the admin server; fed by the request log."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[str] = Counter()
        self.audio_s = 0.0
        self.ttft = Histogram()
        self.queue = Histogram()
        self.request = Histogram()

    def ended(self, known: Known) -> None:
        """A request ended."""
        self.add(known.request(""))

    def add(self, request: Request) -> None:
        """Count an ended request."""
        self.requests[request.route, request.error or "ok"] += 1
        self.tokens["prompt"] += request.prompt_tokens
        self.tokens["cached"] += request.cached_tokens
        self.tokens["completion"] += request.tokens
        self.audio_s += request.audio_s
        self.request.add(request.route, request.age_s(request.started))
        self.queue.add("", request.waited_ms / 1000)
        if request.ttft_ms is not None:
            modality = "audio" if request.ttfa_ms == request.ttft_ms else next(iter(request.outputs), "")
            self.ttft.add(modality, request.ttft_ms / 1000)


def exposition(view: View, totals: Totals) -> bytes:
    """All series as text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector(view, totals))
    return generate_latest(registry)


class Collector:
    """Makes the families when the registry asks."""

    def __init__(self, view: View, totals: Totals) -> None:
        self._view = view
        self._totals = totals

    def collect(self) -> Iterator[Any]:
        """Every family."""
        store = self._view.hub.store
        yield from self._counted()
        yield from self._deployment(store)
        yield from self._nodes(store)
        yield from self._ranks(store)
        yield from self._edges(store)

    def _counted(self) -> Iterator[Any]:
        totals = self._totals
        yield _counter("mstar_requests", "Answered requests by route and error code (ok).", ("route", "code"),
                       totals.requests)  # fmt: skip
        tokens = {(kind,): float(count) for kind, count in totals.tokens.items()}
        yield _counter("mstar_tokens", "Tokens read (prompt, cached) and made (completion).", ("kind",), tokens)
        yield _counter("mstar_audio_seconds", "Seconds of sound made.", (), {(): totals.audio_s})
        yield _histogram("mstar_queue_seconds", "Wait for a slot and in queues of nodes.", (), totals.queue)
        yield _histogram("mstar_ttft_seconds", "From arrival to the first output.", ("modality",), totals.ttft)
        yield _histogram("mstar_request_seconds", "From arrival to end.", ("route",), totals.request)

    def _deployment(self, store: Store) -> Iterator[Any]:
        head = store.deployment
        yield _gauge("mstar_inflight", "Requests that run.", (), {(): head.running})
        yield _gauge("mstar_queue_depth", "Requests that wait for a slot.", (), {(): head.waiting + head.preparing})
        up = {(name,): float(child.state == "ready") for name, child in store.children.items()}
        yield _gauge("mstar_component_up", "Whether a process of the deployment is there.", ("component",), up)
        core = {(name,): child.core for name, child in store.children.items()}
        yield _gauge("mstar_process_cores", "Share of one CPU core.", ("component",), core)
        resident = {(name,): child.resident_bytes for name, child in store.children.items()}
        yield _gauge("mstar_process_resident_bytes", "Memory of a process.", ("component",), resident)
        yield _counter("mstar_restarts", "Restarts of processes.", (), {(): self._view.restarts})
        yield _gauge("mstar_state", "1 for the state of the deployment.", ("state",), {(self._view.state,): 1.0})
        yield _gauge("mstar_watchers", "Readers of the watch.", (), {(): self._view.hub.watchers})

    def _nodes(self, store: Store) -> Iterator[Any]:
        nodes = list(store.nodes.values())
        pages: Counter[tuple[str, str]] = Counter()
        batch: Counter[tuple[str]] = Counter()
        for node in nodes:
            for state in ("total", "used", "cached"):
                pages[node.name, state] += getattr(node, f"pages_{state}")
            batch[(node.name,)] += node.batch
        yield _gauge("mstar_kv_pages", "Pages of a node's cache by state.", ("node", "state"), pages)
        yield _gauge("mstar_batch_size", "Rows of a node's last batch.", ("node",), batch)
        yield _gauge("mstar_graph_steps", "Steps of a node since its start: replayed from a graph, or plain.",
                     ("node", "kind", "how"), dict(self._graph_steps(nodes)))  # fmt: skip
        where = ("node", "rank")
        yield _gauge("mstar_node_queue", "Rows that could run now.", where, _by_rank(nodes, "queue"))
        yield _gauge("mstar_node_waiting", "Jobs without a slot or pages.", where, _by_rank(nodes, "waiting"))
        yield _gauge("mstar_node_busy", "Share of time in steps.", where, _by_rank(nodes, "busy"))
        yield _gauge("mstar_node_steps_per_second", "Steps a second.", where, _by_rank(nodes, "steps_s"))
        quantiles = {
            (node.name, str(node.rank), share): None if ms is None else ms / 1000
            for node in nodes
            for share, ms in (("0.5", node.step_p50_ms), ("0.99", node.step_p99_ms))
        }
        yield _gauge("mstar_node_step_seconds", "Time of a step, of the last 256.", (*where, "quantile"), quantiles)
        yield _counter("mstar_node_preempted", "Requests whose pages were taken.", where, _by_rank(nodes, "preempted"))

    def _graph_steps(self, nodes: list[Node]) -> Iterator[tuple[tuple[str, str, str], float]]:
        found: Counter[tuple[str, str, str]] = Counter()
        readings = {"graph_hits": ("decode", "replayed"), "graph_misses": ("decode", "plain"),
                    "prefill_hits": ("prefill", "replayed"), "prefill_misses": ("prefill", "plain")}  # fmt: skip
        for node in nodes:
            for reading, (kind, how) in readings.items():
                value = self._view.values.get(f"worker-{node.rank}.{node.name}.{reading}")
                if value is not None:
                    found[node.name, kind, how] += int(value)
        yield from ((where, float(count)) for where, count in found.items())

    def _ranks(self, store: Store) -> Iterator[Any]:
        ranks = store.ranks
        yield _gauge("mstar_rank_busy", "Share of time in steps.", ("rank",), {(r,): i.busy for r, i in ranks.items()})
        held = {(key,): rank.requests for key, rank in ranks.items()}
        yield _gauge("mstar_rank_requests", "Requests open on a rank.", ("rank",), held)
        memory = {
            (key, state): value
            for key, rank in ranks.items()
            for state, value in (("used", rank.memory_used), ("total", rank.memory_total))
        }
        yield _gauge("mstar_rank_memory_bytes", "Device memory of a rank.", ("rank", "state"), memory)
        shared = {(key,): rank.shm_bytes for key, rank in ranks.items()}
        yield _gauge("mstar_rank_shm_bytes", "Shared memory in use by a rank.", ("rank",), shared)
        gpus = store.gpus
        yield _gauge("mstar_gpu_utilisation", "Share of time with a kernel running.", ("gpu",),
                     {(key,): gpu.util for key, gpu in gpus.items()})  # fmt: skip
        used = {
            (key, state): value
            for key, gpu in gpus.items()
            for state, value in (("used", gpu.memory_used), ("total", gpu.memory_total))
        }
        yield _gauge("mstar_gpu_memory_bytes", "Memory of a GPU.", ("gpu", "state"), used)
        yield _gauge("mstar_gpu_power_watts", "Power of a GPU.", ("gpu",), {(k,): g.power_w for k, g in gpus.items()})

    def _edges(self, store: Store) -> Iterator[Any]:
        names = ("edge", "source_rank", "into_rank")
        edges = {(e.name, str(e.source_rank), str(e.into_rank)): e for e in store.edges.values()}
        yield _counter(
            "mstar_edge_items", "Items that went over an edge.", names, {k: e.items for k, e in edges.items()}
        )
        yield _counter(
            "mstar_edge_bytes", "Bytes that went over an edge.", names, {k: e.bytes for k, e in edges.items()}
        )
        waits = {key: None if e.transfer_ms is None else e.transfer_ms / 1000 for key, e in edges.items()}
        yield _gauge("mstar_edge_transfer_seconds", "Mean way of a message in the last second.", names, waits)


Labelled = Mapping[tuple[str, ...], float | int | None]


def _by_rank(nodes: list[Node], field: str) -> Labelled:
    return {(node.name, str(node.rank)): getattr(node, field) for node in nodes}


def _gauge(name: str, doc: str, labels: tuple[str, ...], values: Mapping[Any, float | int | None]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, doc, labels=labels)
    return _filled(family, values)


def _counter(name: str, doc: str, labels: tuple[str, ...], values: Mapping[Any, float | int | None]) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, doc, labels=labels)
    return _filled(family, values)


def _filled(family: Any, values: Mapping[Any, float | int | None]) -> Any:
    for labels, value in values.items():
        if value is not None:
            family.add_metric(list(labels), float(value))
    return family


def _histogram(name: str, doc: str, labels: tuple[str, ...], found: Histogram) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, doc, labels=labels)
    for label, buckets, total in found.samples():
        family.add_metric([label] if labels else [], buckets, total)
    return family
