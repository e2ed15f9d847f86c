"""Observation of a deployment under load: CPU seconds of every process, and the stages of its requests."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from bench.serving.deployment import Served
from bench.serving.figures import Figures
from bench.serving.spent import note_spent

TELEMETRY_S: Final = 0.3
"""Longer than the telemetry interval of a tenth of a second."""

MOST_TRACES: Final = 60


@contextmanager
def watched(served: Served, figures: Figures, label: str) -> Iterator[dict[str, Any]]:
    """Record the costs of every process during the block. Yields the section's facts, which the block extends."""
    time.sleep(TELEMETRY_S)
    facts: dict[str, Any] = {}
    values = served.fresh_values()
    cpu, own, start = served.cpu_s(), time.process_time(), time.monotonic()
    yield facts
    own = time.process_time() - own
    loaded_s = time.monotonic() - start
    now = served.cpu_s()
    # An ended pool process takes its seconds with it, so a sum over processes may decrease.
    spent = {name: max(0.0, now[name] - cpu.get(name, 0.0)) for name in now} | {"client": own}
    time.sleep(TELEMETRY_S)
    after = served.fresh_values()
    changed = {name: value - values.get(name, 0.0) for name, value in after.items()}
    elapsed_s = time.monotonic() - start
    note_spent(figures, label, spent=spent, changed=changed, loaded_s=loaded_s, elapsed_s=elapsed_s)
    facts |= {
        "loaded_s": round(loaded_s, 3),
        "elapsed_s": round(elapsed_s, 3),
        "cpu_s": {name: round(seconds, 3) for name, seconds in spent.items()},
        "telemetry": {name: round(value, 4) for name, value in changed.items() if value},
    }


def note_stations(served: Served, figures: Figures, label: str, count: int) -> None:
    """Add the stages of the newest requests from their traces: seconds from arrival to the start and end of each.

    count: number of requests of the load; at most 60 are read. A stage is a process with its node and walk. Waiting
    time is a stage whose name ends in `queue`.
    """
    begins: dict[str, list[float]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    for trace in served.traces(min(count, MOST_TRACES)):
        for found in trace["sums"]:
            waited = "queue" if found["kind"] == "queue" else ""
            station = "_".join(filter(None, (found["process"], found["node"], found["walk"], waited)))
            begins[station].append(found["start_ms"] / 1e3)
            ends[station].append(found["end_ms"] / 1e3)
    for station, seconds in begins.items():
        figures.add(f"station_{station}_begin_{label}", seconds)
        figures.add(f"station_{station}_end_{label}", ends[station])
