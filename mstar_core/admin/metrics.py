"""Prometheus text of the admin socket, made when it is asked for: the api's families, and series per rank and edge.

What the api counts is shown as it told it last, so that both pages say the same and this one goes on without it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from mstar_core.observe.families import CONTENT_TYPE, made_by
from mstar_core.observe.frames import NodeStatus
from mstar_core.observe.step_histograms import READINGS, step_histograms
from mstar_core.observe.store import Store

__all__ = ["CONTENT_TYPE", "exposition"]

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from mstar_core.messages.telemetry import MetricSample
    from mstar_core.observe.hub import TelemetryHub
    from mstar_core.observe.prometheus import Labelled


class MetricsSource(Protocol):
    """What is read of the supervisor."""

    hub: TelemetryHub
    values: dict[str, float]
    restarts: int
    state: str
    publisher: Any


def exposition(view: MetricsSource) -> bytes:
    """All series as text."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Collector(view))
    return generate_latest(registry)


class Collector:
    """Makes the families when the registry asks."""

    def __init__(self, view: MetricsSource) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        store = self._view.hub.store
        yield from self._of_the_api()
        yield from self._deployment(store)
        yield from self._processes(store)
        yield from self._nodes(list(store.nodes.values()))
        yield from self._nodes_by_rank(list(store.nodes.values()))
        yield from self._ranks(store)
        yield from self._gpus(store)
        yield from self._edges(store)

    def _of_the_api(self) -> Iterator[Metric]:
        from mstar_core.observe.prometheus import SUFFIXES, rebuilt

        by_name: defaultdict[str, list[MetricSample]] = defaultdict(list)
        for sample in self._view.publisher.samples.values():
            by_name[sample.name].append(sample)
        for family in made_by("api"):
            names = [f"{family.name}{suffix}" for suffix in SUFFIXES[family.kind]]
            yield rebuilt(family, [sample for name in names for sample in by_name[name]])

    def _deployment(self, store: Store) -> Iterator[Metric]:
        yield _filled("mstar_restarts", {(): self._view.restarts})
        yield _filled("mstar_state", {(self._view.state,): 1.0})
        yield _filled("mstar_watchers", {(): self._view.hub.watchers})
        yield _filled(
            "mstar_component_up", {(name,): float(child.state == "ready") for name, child in store.children.items()}
        )

    def _processes(self, store: Store) -> Iterator[Metric]:
        children = store.children
        yield _filled("mstar_process_cores", {(name,): child.core for name, child in children.items()})
        resident = {(name,): child.resident_bytes for name, child in children.items()}
        yield _filled("mstar_process_resident_bytes", resident)
        sent = {(name,): self._view.values.get(f"{name}.sent_bytes") for name in children}
        yield _filled("mstar_transport_bytes", sent)

    def _nodes(self, nodes: list[NodeStatus]) -> Iterator[Metric]:
        pages: Counter[tuple[str, ...]] = Counter()
        batch: Counter[tuple[str, ...]] = Counter()
        for node in nodes:
            for state in ("total", "used", "cached"):
                pages[node.name, state] += getattr(node, f"pages_{state}")
            batch[(node.name,)] += node.batch
        yield _filled("mstar_kv_pages", pages)
        yield _filled("mstar_batch_size", batch)
        yield from self._steps(nodes)
        yield _filled("mstar_preempted", self._sums(nodes, "preempted"))
        yield _filled("mstar_graph_bytes", self._sums(nodes, "graph_bytes"))
        yield _filled("mstar_graph_steps", self._graph_steps(nodes))

    def _steps(self, nodes: list[NodeStatus]) -> Iterator[Metric]:
        by_node: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for reading in READINGS:
            for (node,), value in self._sums(nodes, reading).items():
                by_node[node][reading] = value or 0.0
        yield from step_histograms(by_node)

    def _sums(self, nodes: list[NodeStatus], reading: str) -> Labelled:
        found: dict[tuple[str, ...], float] = {}
        for node in nodes:
            value = self._view.values.get(f"worker-{node.rank}.{node.name}.{reading}")
            if value is not None:
                found[(node.name,)] = found.get((node.name,), 0.0) + value
        return found

    def _graph_steps(self, nodes: list[NodeStatus]) -> Labelled:
        readings = {"graph_hits": ("decode", "replayed"), "graph_misses": ("decode", "plain"),
                    "prefill_hits": ("prefill", "replayed"), "prefill_misses": ("prefill", "plain")}  # fmt: skip
        return {
            (node, *kind_how): value
            for reading, kind_how in readings.items()
            for (node,), value in self._sums(nodes, reading).items()
        }

    def _nodes_by_rank(self, nodes: list[NodeStatus]) -> Iterator[Metric]:
        yield _filled("mstar_node_queue", _by_rank(nodes, "queue"))
        yield _filled("mstar_node_waiting", _by_rank(nodes, "waiting"))
        yield _filled("mstar_node_busy", _by_rank(nodes, "busy"))
        yield _filled("mstar_node_steps_per_second", _by_rank(nodes, "steps_s"))
        percentiles = {
            (node.name, str(node.rank), percent): None if ms is None else ms / 1000
            for node in nodes
            for percent, ms in (("50", node.step_p50_ms), ("99", node.step_p99_ms))
        }
        yield _filled("mstar_node_step_seconds", percentiles)
        pages = {
            (node.name, str(node.rank), state): getattr(node, f"pages_{state}")
            for node in nodes
            for state in ("total", "used", "cached")
        }
        yield _filled("mstar_node_pages", pages)
        yield _filled("mstar_node_preempted", _by_rank(nodes, "preempted"))

    def _ranks(self, store: Store) -> Iterator[Metric]:
        ranks = store.ranks
        yield _filled("mstar_rank_busy", {(key,): rank.busy for key, rank in ranks.items()})
        yield _filled("mstar_rank_requests", {(key,): rank.requests for key, rank in ranks.items()})
        memory = {
            (key, state): value
            for key, rank in ranks.items()
            for state, value in (("used", rank.memory_used), ("total", rank.memory_total))
        }
        yield _filled("mstar_rank_memory_bytes", memory)
        yield _filled("mstar_rank_shm_bytes", {(key,): rank.shm_bytes for key, rank in ranks.items()})

    def _gpus(self, store: Store) -> Iterator[Metric]:
        gpus = store.gpus
        yield _filled("mstar_gpu_utilisation", {(key,): gpu.util for key, gpu in gpus.items()})
        memory = {
            (key, state): value
            for key, gpu in gpus.items()
            for state, value in (("used", gpu.memory_used), ("total", gpu.memory_total))
        }
        yield _filled("mstar_gpu_memory_bytes", memory)
        yield _filled("mstar_gpu_power_watts", {(key,): gpu.power_w for key, gpu in gpus.items()})

    def _edges(self, store: Store) -> Iterator[Metric]:
        edges = {(e.name, str(e.source_rank), str(e.into_rank)): e for e in store.edges.values()}
        yield _filled("mstar_edge_items", {key: edge.items for key, edge in edges.items()})
        yield _filled("mstar_edge_bytes", {key: edge.bytes for key, edge in edges.items()})
        waits = {key: None if e.transfer_ms is None else e.transfer_ms / 1000 for key, e in edges.items()}
        yield _filled("mstar_edge_transfer_seconds", waits)


def _filled(name: str, values: Labelled) -> Metric:
    # Imported when metrics are read: it takes longer than the rest of the admin socket.
    from mstar_core.observe.prometheus import filled

    return filled(name, values)


def _by_rank(nodes: list[NodeStatus], field: str) -> Labelled:
    return {(node.name, str(node.rank)): getattr(node, field) for node in nodes}
