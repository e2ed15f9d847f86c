"""Metric samples that the supervisor makes, from the hub's state and the flat readings of its children."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mstar_core.messages.telemetry import MetricSample
from mstar_core.observe.frames import LOCAL, GpuStatus, HostStatus, NodeStatus, RankStatus
from mstar_core.observe.hub import HubState
from mstar_core.observe.metrics import STEP_READINGS, Labelled, samples, step_samples

PAGE_STATES = ("total", "used", "cached", "leased")
GRAPH_STATES = ("captured", "planned")
GRAPH_READINGS = {
    "graph_hits": ("decode", "replayed"),
    "graph_misses": ("decode", "plain"),
    "prefill_hits": ("prefill", "replayed"),
    "prefill_misses": ("prefill", "plain"),
}
"""Reading of a node -> labels of `mstar_graph_steps`."""


KERNEL_READINGS = ("ahead", "missed", "late")
"""Values of the label `when` of `mstar_kernels_compiled`."""


def shared_samples(store: HubState, values: Mapping[str, float], restarts: int) -> Iterator[MetricSample]:
    """Yield the samples that the api shows too: restarts, bytes sent, and nodes summed over ranks."""
    nodes = list(store.nodes.values())
    yield from samples("mstar_restarts", {(): restarts})
    yield from samples("mstar_transport_bytes", {(name,): values.get(f"{name}.sent_bytes") for name in store.children})
    yield from samples("mstar_leftovers", {(name,): values.get(f"{name}.leftovers") for name in store.children})
    pages: Counter[tuple[str, str]] = Counter()
    batch: Counter[tuple[str]] = Counter()
    for node in nodes:
        batch[(node.name,)] += node.batch
        if node.pages_total:
            for state in PAGE_STATES:
                pages[node.name, state] += getattr(node, f"pages_{state}")
    yield from samples("mstar_kv_pages", pages)
    yield from samples("mstar_batch_size", batch)
    steps: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for reading in STEP_READINGS:
        for node_name, value in _sums(nodes, values, reading).items():
            steps[node_name][reading] = value
    yield from step_samples(steps)
    for family, reading in (("mstar_preempted", "preempted"), ("mstar_graph_bytes", "graph_bytes")):
        yield from samples(family, {(name,): value for name, value in _sums(nodes, values, reading).items()})
    readings = ((name.partition(".kernels_"), value) for name, value in values.items())
    compiled = {(worker, when): value for (worker, _, when), value in readings if when in KERNEL_READINGS}
    yield from samples("mstar_kernels_compiled", compiled)
    for reading, labels in GRAPH_READINGS.items():
        counts = {(name, *labels): value for name, value in _sums(nodes, values, reading).items()}
        yield from samples("mstar_graph_steps", counts)
    for state in GRAPH_STATES:
        found = _sums(nodes, values, f"graphs_{state}")
        yield from samples("mstar_graphs", {(name, state): value for name, value in found.items()})


def _sums(nodes: Sequence[NodeStatus], values: Mapping[str, float], reading: str) -> dict[str, float]:
    """Return node -> sum of a reading over its ranks; a node that no worker has reported is left out."""
    sums: dict[str, float] = {}
    for node in nodes:
        value = values.get(f"worker-{node.rank}.{node.name}.{reading}")
        if value is not None:
            sums[node.name] = sums.get(node.name, 0.0) + value
    return sums


def socket_samples(store: HubState, state: str, watchers: int) -> Iterator[MetricSample]:
    """Yield the samples of the admin socket: state, processes, nodes by rank, ranks, GPUs, hosts and edges."""
    children, ranks, gpus = store.children, store.ranks, store.gpus
    yield from samples("mstar_state", {(state,): 1})
    yield from samples("mstar_watchers", {(): watchers})
    processes = {(name, child.host or LOCAL): child for name, child in children.items()}
    yield from samples("mstar_component_up", {(name,): child.state == "ready" for name, child in children.items()})
    yield from samples("mstar_process_cores", {key: child.core for key, child in processes.items()})
    resident = {key: child.resident_bytes for key, child in processes.items()}
    yield from samples("mstar_process_resident_bytes", resident)
    yield from _nodes_by_rank(list(store.nodes.values()))
    placed = {(key, rank.host or LOCAL): rank for key, rank in ranks.items()}
    yield from samples("mstar_rank_busy", {key: rank.busy for key, rank in placed.items()})
    yield from samples("mstar_rank_requests", {key: rank.requests for key, rank in placed.items()})
    yield from samples("mstar_rank_memory_bytes", _memory(placed))
    yield from samples("mstar_rank_given_back_bytes", {key: rank.given_back_bytes for key, rank in placed.items()})
    yield from samples("mstar_rank_kept_bytes", {key: rank.kept_bytes for key, rank in placed.items()})
    yield from samples("mstar_wakes", {(): store.deployment.wakes})
    yield from samples("mstar_rank_shm_bytes", {key: rank.shm_bytes for key, rank in placed.items()})
    grouped = {key: rank for key, rank in ranks.items() if rank.group}
    yield from samples("mstar_group_epoch", {(key, str(rank.group[0])): rank.epoch for key, rank in grouped.items()})
    followers = {key: rank for key, rank in grouped.items() if rank.follows}
    yield from samples("mstar_group_plans", {(key,): rank.plans for key, rank in followers.items()})
    cards = {(str(gpu.index), gpu.host or LOCAL): gpu for gpu in gpus.values()}
    yield from samples("mstar_gpu_utilisation", {key: gpu.util for key, gpu in cards.items()})
    yield from samples("mstar_gpu_memory_bytes", _memory(cards))
    yield from samples("mstar_gpu_power_watts", {key: gpu.power_w for key, gpu in cards.items()})
    yield from _hosts(store.hosts)
    edges = {(e.name, str(e.source_rank), str(e.into_rank)): e for e in store.edges.values()}
    yield from samples("mstar_edge_items", {key: edge.items for key, edge in edges.items()})
    yield from samples("mstar_edge_bytes", {key: edge.bytes for key, edge in edges.items()})
    yield from samples("mstar_edge_transfer_seconds", {key: _seconds(e.transfer_ms) for key, e in edges.items()})


def _nodes_by_rank(nodes: Sequence[NodeStatus]) -> Iterator[MetricSample]:
    fields = {
        "mstar_node_queue": "queue",
        "mstar_node_waiting": "waiting",
        "mstar_node_busy": "busy",
        "mstar_node_steps_per_second": "steps_s",
        "mstar_node_preempted": "preempted",
    }
    for family, field in fields.items():
        yield from samples(family, {(node.name, str(node.rank)): getattr(node, field) for node in nodes})
    percentiles = {
        (node.name, str(node.rank), percent): _seconds(ms)
        for node in nodes
        for percent, ms in (("50", node.step_p50_ms), ("99", node.step_p99_ms))
    }
    yield from samples("mstar_node_step_seconds", percentiles)
    pages = {
        (node.name, str(node.rank), state): getattr(node, f"pages_{state}") for node in nodes for state in PAGE_STATES
    }
    yield from samples("mstar_node_pages", pages)


def _hosts(hosts: Mapping[str, HostStatus]) -> Iterator[MetricSample]:
    """Yield the samples of hosts; the loads of those whose agents report."""
    reached = {key: host for key, host in hosts.items() if host.state in ("", "ready")}
    loaded = {(key,): host for key, host in reached.items() if host.memory_total}
    yield from samples("mstar_host_up", {(key,): key in reached for key in hosts})
    yield from samples("mstar_host_cores", {key: round(sum(host.cores), 2) for key, host in loaded.items()})
    yield from samples("mstar_host_memory_bytes", _memory(loaded))
    directions = {
        (*key, direction): rate
        for key, host in loaded.items()
        for direction, rate in (("in", host.net_in_s), ("out", host.net_out_s))
    }
    yield from samples("mstar_host_network_bytes_per_second", directions)
    yield from samples(
        "mstar_host_round_trip_seconds", {(key,): _seconds(host.round_trip_ms) for key, host in reached.items()}
    )


def _memory(items: Mapping[Any, RankStatus | GpuStatus | HostStatus]) -> Labelled:
    states = ("used", "total")
    return {(*key, state): getattr(item, f"memory_{state}") for key, item in items.items() for state in states}


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000
