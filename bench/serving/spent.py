"""Cost of a load: CPU time of every process, and the breakdown of a worker's time from its own counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from bench.serving.figures import Figures

PARTS: Final = ("launch_s", "collect_s", "route_s")
"""A node's sums of host seconds. With `wait_s` and `idle_s` of its worker and a rest they add up to the wall time."""


def note_spent(
    figures: Figures,
    label: str,
    *,
    spent: Mapping[str, float],
    changed: Mapping[str, float],
    loaded_s: float,
    elapsed_s: float,
) -> None:
    """Add a section's costs to the figures.

    spent: CPU seconds by process. changed: telemetry sums, as differences over `elapsed_s`. loaded_s: seconds of load.
    """
    for name, seconds in spent.items():
        figures.add(f"cpu_{name.replace(' ', '_')}_{label}", [seconds / loaded_s], "1")
    for worker in workers(changed):
        nodes = list(nodes_of(worker, changed))
        for node in nodes:
            _note_node(figures, f"{worker}.{node}", node, label, changed)
        busy = sum(changed.get(f"{worker}.{node}.{part}", 0.0) for node in nodes for part in PARTS)
        idle, waited = (changed.get(f"{worker}.{name}", 0.0) for name in ("idle_s", "wait_s"))
        shares = {"steps": busy, "wait": waited, "idle": idle, "rest": elapsed_s - busy - waited - idle}
        for name, seconds in shares.items():
            figures.add(f"{worker}_{name}_share_{label}", [seconds / elapsed_s], "1")


def _note_node(figures: Figures, prefix: str, node: str, label: str, changed: Mapping[str, float]) -> None:
    steps = changed[f"{prefix}.steps"]
    for part in (*PARTS, "busy_s"):
        if f"{prefix}.{part}" in changed:
            figures.add(f"{node}_{part.removesuffix('_s')}_per_step_{label}", [changed[f"{prefix}.{part}"] / steps])
    figures.add(f"{node}_rows_per_step_{label}", [changed[f"{prefix}.rows"] / steps], "1")
    figures.add(f"{node}_steps_{label}", [steps], "1")
    hits, misses = (changed.get(f"{prefix}.graph_{name}", 0.0) for name in ("hits", "misses"))
    if hits + misses:
        figures.add(f"{node}_graph_hit_share_{label}", [hits / (hits + misses)], "1")


def workers(values: Mapping[str, float]) -> list[str]:
    """Return the names of the workers that have reported."""
    return sorted({name.partition(".")[0] for name in values if name.startswith("worker-")})


def nodes_of(worker: str, values: Mapping[str, float]) -> Iterator[str]:
    """Return the nodes of a worker that have run steps."""
    for name, value in values.items():
        owner, _, rest = name.partition(".")
        node, _, field = rest.rpartition(".")
        if owner == worker and node and field == "steps" and value:
            yield node
