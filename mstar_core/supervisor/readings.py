"""Readings of nodes out of the flat telemetry of workers: `worker-RANK.NODE.READING`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from mstar_core.observe.step_histograms import READINGS

FORWARDED: Final = {
    "pages_total": "pages_total",
    "pages_used": "pages_used",
    "pages_cached": "pages_cached",
    "batch": "batch_size",
    "preempted": "preempted",
    "graph_hits": "decode_replayed",
    "graph_misses": "decode_plain",
    "prefill_hits": "prefill_replayed",
    "prefill_misses": "prefill_plain",
    "graph_bytes": "graph_bytes",
    **{reading: reading for reading in sorted(READINGS)},
}


class Readings:
    """One look at the values: by rank, node and reading; and requests by walk. Owned by whoever takes the look."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values
        self._walks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for name, value in values.items():
            node, found, walk = name.partition(".walk.")
            if found and value:
                self._walks[node][walk] = int(value)

    def find(self, rank: int, node: str, reading: str) -> float | None:
        """A reading, None when the worker has not told it."""
        return self._values.get(f"worker-{rank}.{node}.{reading}")

    def number(self, rank: int, node: str, reading: str) -> float:
        """A reading, 0.0 when the worker has not told it."""
        return self._values.get(f"worker-{rank}.{node}.{reading}", 0.0)

    def walks(self, rank: int, node: str) -> dict[str, int]:
        """Walk -> requests in it at that node."""
        return self._walks.get(f"worker-{rank}.{node}", {})


def node_readings(values: Mapping[str, float]) -> dict[str, float]:
    """Readings by node, added up over ranks, for the api's metrics: one source for both."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in values.items():
        process, _, rest = name.partition(".")
        node, _, reading = rest.rpartition(".")
        if process.startswith("worker-") and node and reading in FORWARDED:
            found[f"node.{node}.{FORWARDED[reading]}"] += value
    return dict(found)


def forwarded(values: Mapping[str, float], restarts: int) -> dict[str, float]:
    """All that the api shows of the others: readings of nodes, bytes that processes handed on, restarts."""
    sent = {
        f"component.{name.removesuffix('.sent_bytes')}.sent_bytes": value
        for name, value in values.items()
        if name.endswith(".sent_bytes")
    }
    return {**node_readings(values), **sent, "deployment.restarts": float(restarts)}
