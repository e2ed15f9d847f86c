"""Trace-event file of a request for Perfetto and chrome://tracing: one row group per process, times in µs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mstarctl.output.waterfall import where_of


def trace_events(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the response of GET /v1/requests/ID/trace. Every span becomes a complete event (`X`)."""
    request = trace["request"]
    processes = {name: index for index, name in enumerate(dict.fromkeys(str(s["process"]) for s in trace["spans"]), 1)}
    threads: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": where_of(name)}}
        for name, pid in processes.items()
    ]
    for span in trace["spans"]:
        process, node = str(span["process"]), str(span["node"])
        thread = threads.get((process, node))
        if thread is None:
            thread = threads[process, node] = len(threads) + 1
            events.append(
                {"ph": "M", "name": "thread_name", "pid": processes[process], "tid": thread, "args": {"name": node}}
            )
        start, end = float(span["start_ms"]), float(span["end_ms"])
        events.append(
            {
                "ph": "X",
                "name": " ".join(word for word in (node, str(span["walk"])) if word),
                "cat": str(span["kind"]),
                "pid": processes[process],
                "tid": thread,
                "ts": round(start * 1000, 3),
                "dur": round((end - start) * 1000, 3),
                "args": {"count": span["count"], "batch": span["batch"], "bytes": span["size_bytes"]},
            }
        )
    facts = {key: request.get(key) for key in ("id", "handle", "model", "state", "ttft_ms", "ttfa_ms", "tokens")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {k: str(v) for k, v in facts.items()}}
