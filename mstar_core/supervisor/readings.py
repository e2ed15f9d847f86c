"""What the api is told of the workers' nodes, once a second, so that its metrics have one source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

FORWARDED = {
    "pages_total": "pages_total",
    "pages_used": "pages_used",
    "pages_cached": "pages_cached",
    "batch": "batch_size",
    "graph_hits": "decode_replayed",
    "graph_misses": "decode_plain",
    "prefill_hits": "prefill_replayed",
    "prefill_misses": "prefill_plain",
    "graph_bytes": "graph_bytes",
}


def node_readings(values: Mapping[str, float]) -> dict[str, float]:
    """Readings by node, added up over ranks. values: telemetry by name, `worker-R.NODE.READING` among others."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in values.items():
        process, _, rest = name.partition(".")
        node, _, reading = rest.rpartition(".")
        if process.startswith("worker-") and node and reading in FORWARDED:
            found[f"node.{node}.{FORWARDED[reading]}"] += value
    return dict(found)
