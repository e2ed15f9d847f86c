"""Waits of a trace: for which node each one waits, and which silence a listener heard. Pure functions.

A worker records that a node had no input as a span of kind `wait`. Most waits are harmless, because a codec is faster
than its language model. The silence that a listener heard in them is a stall. Used by the request log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mstar_core.observe.frames import GraphView

WAIT: Final = "wait"
STALL: Final = "stall"
LEAST_HEARD_MS: Final = 20.0
"""Shorter gaps are within the error of the estimate, which assumes chunks of equal length."""

Record = Mapping[str, Any]


def with_waits(trace: Record, request: Record, graph: GraphView | None) -> dict[str, Any]:
    """Return the trace with the silence that a listener heard as stalls, and with `waits_for` in its waits.

    request: its ttfa_ms and audio_s, from which the playback is estimated. graph: of the deployment; without it, no
    wait is named and none counts as heard. Takes the lists `spans` and `sums` of the trace.
    """
    feeds = feeders(graph)
    silences = {node: list(heard(trace, request, node)) for node in speakers(graph)}
    spans, heard_ms = [], dict.fromkeys(silences, 0.0)
    for span in _records(trace, "spans"):
        if span.get("kind") != WAIT:
            spans.append(dict(span))
            continue
        named, length = _named(span, feeds), float(span["end_ms"]) - float(span["start_ms"])
        if float(span.get("busy_ms", length)) < length:  # many short waits, which no listener can have heard
            spans.append(named)
            continue
        for kind, start, end in _parts(span, silences.get(str(span["node"]), ())):
            if kind == STALL:
                heard_ms[str(span["node"])] += end - start
            spans.append({**named, "kind": kind, "start_ms": start, "end_ms": end, "busy_ms": round(end - start, 3)})
    sums = []
    for total in _records(trace, "sums"):
        if total.get("kind") != WAIT:
            sums.append(dict(total))
            continue
        stalled = heard_ms.get(str(total["node"]), 0.0)
        same = [s for s in spans if _place(s) == _place(total)]
        sums.append({**_named(total, feeds), "busy_ms": round(max(0.0, float(total["busy_ms"]) - stalled), 3)})
        if stalled:
            gaps = [s for s in same if s["kind"] == STALL]
            limits = {"start_ms": min(s["start_ms"] for s in gaps), "end_ms": max(s["end_ms"] for s in gaps)}
            count = {"spans": len(gaps), "count": len(gaps)}
            sums.append({**total, "kind": STALL, "busy_ms": round(stalled, 3), **count, **limits})
    return {**trace, "spans": spans, "sums": sums}


def _named(record: Record, feeds: Mapping[str, str]) -> dict[str, Any]:
    return {**record, "waits_for": feeds.get(str(record["node"]), "")}


def feeders(graph: GraphView | None) -> dict[str, str]:
    """Return the nodes whose streams feed each node: `{"snac_decoder": "LLM"}`."""
    sources_of: dict[str, dict[str, None]] = {}
    for edge in () if graph is None else graph.edges:
        if edge.is_stream and edge.source and edge.into:
            sources_of.setdefault(edge.into, {})[edge.source] = None
    return {node: " and ".join(sources) for node, sources in sources_of.items()}


def speakers(graph: GraphView | None) -> frozenset[str]:
    """Return the nodes whose output is sound that a client hears."""
    edges = () if graph is None else graph.edges
    return frozenset(edge.source for edge in edges if edge.modality == "audio" and edge.source and not edge.into)


def heard(trace: Record, request: Record, node: str) -> Iterator[tuple[float, float]]:
    """Yield the silences of a listener who plays from the first chunk on, as (start, end) in ms.

    The steps of `node` have equal shares of the request's audio. Steps whose spans were dropped came in time.
    """
    first, audio = request.get("ttfa_ms"), float(request.get("audio_s") or 0.0)
    ends = sorted(
        (float(span["end_ms"]), int(span.get("count") or 1))
        for span in _records(trace, "spans")
        if span.get("node") == node and span.get("kind") == "compute" and not span.get("is_open")
    )
    known = sum(count for _, count in ends)
    sums = [s for s in _records(trace, "sums") if s.get("node") == node and s.get("kind") == "compute"]
    steps = max(known, sum(int(s.get("count") or 0) for s in sums))
    if first is None or not audio or not steps:
        return
    step_audio_ms = 1000 * audio / steps
    played_until = float(first) + step_audio_ms * (steps - known)
    for end, count in ends:
        if end - played_until >= LEAST_HEARD_MS and end > float(first) + LEAST_HEARD_MS:
            yield played_until, end
        played_until = max(played_until, end) + step_audio_ms * count


def _parts(span: Record, silences: Sequence[tuple[float, float]]) -> Iterator[tuple[str, float, float]]:
    """Cut a wait at the silences that overlap it."""
    at, end = float(span["start_ms"]), float(span["end_ms"])
    for begin, until in silences:
        low, high = max(at, begin), min(end, until)
        if high <= low:
            continue
        if low > at:
            yield WAIT, at, low
        yield STALL, low, high
        at = high
    if at < end or at == float(span["start_ms"]):
        yield WAIT, at, end


def _place(record: Record) -> tuple[str, str, str]:
    return str(record.get("process")), str(record.get("node")), str(record.get("walk"))


def _records(trace: Record, name: str) -> list[Record]:
    items = trace.get(name)
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list) else []
