"""Parts of the time of a request: compute by node, queue, wait, transfer, and the time between steps.

Every view takes its figures from here. Used by the request log, and by load tests for recorded summaries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

COMPUTE: Final = "compute"
QUEUE, TRANSFER, WAIT, STALL = "queue", "transfer", "wait", "stall"
LEAST_MS: Final = 1e-6
BETWEEN: Final = "between steps"
PARALLEL: Final = "in parallel"
"""Names of the parts that belong to no node, see the glossary."""

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. node: of compute and waits, empty otherwise. ms: negative for compute that ran at the same time."""

    kind: str
    node: str = ""
    ms: float

    @property
    def name(self) -> str:
        """`LLM` for its compute, `snac_decoder wait`, else the kind."""
        return self.kind if not self.node else self.node if self.kind == COMPUTE else f"{self.node} {self.kind}"


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Activity of one kind at one place. density: share of the stretch in which it went on."""

    process: str
    node: str
    kind: str
    start: float
    end: float
    density: float


def parts(records: Iterable[Record], total_ms: float) -> list[Part]:
    """Return the parts of a request's time, compute first; they add up to `total_ms`.

    records: sums of a trace, and its open spans. total_ms: from arrival to the end, or to now.

    Compute is exact. In the rest of the time nothing ran: it belongs to queues as far as jobs were ready, then to
    transfers, to waits for input, and else lies between steps. Each activity is assumed to be spread evenly from its
    start to its end. A stall is a wait that a listener heard, and counts as one.
    """
    spans = list(records)
    compute: dict[str, float] = {}
    for record in spans:
        if record["kind"] == COMPUTE:
            name = str(record["node"] or record["process"])
            compute[name] = compute.get(name, 0.0) + float(record["busy_ms"])
    spent = sum(compute.values())
    idle, overlap = _rest([_stretch(record, total_ms) for record in spans], total_ms)
    overlap = max(overlap, spent - total_ms)
    rest = max(0.0, total_ms - spent + overlap)
    entries = [Part(kind=COMPUTE, node=name, ms=ms) for name, ms in compute.items()]
    seen = sum(idle.values())
    if rest and not seen:
        idle, seen = {(BETWEEN, ""): rest}, rest
    shares = ((kind, node, ms * rest / seen) for (kind, node), ms in idle.items() if seen)
    entries += [Part(kind=kind, node=node, ms=ms) for kind, node, ms in shares if ms >= LEAST_MS]
    if overlap >= LEAST_MS:
        entries.append(Part(kind=PARALLEL, ms=-overlap))
    return entries


def _stretch(record: Record, total_ms: float) -> _Stretch:
    start, end = float(record["start_ms"]), float(record["end_ms"])
    density = min(1.0, float(record["busy_ms"]) / (end - start)) if end > start else 0.0
    where = str(record["process"]), str(record["node"] or record["process"]), str(record["kind"])
    return _Stretch(*where, max(0.0, start), min(end, total_ms), density)


def _rest(stretches: Sequence[_Stretch], total_ms: float) -> tuple[dict[tuple[str, str], float], float]:
    """Return the time in which nothing ran by (kind, node), and the time in which several processes computed."""
    real = [stretch for stretch in stretches if stretch.end > stretch.start]
    edges = sorted({0.0, total_ms, *(stretch.start for stretch in real), *(stretch.end for stretch in real)})
    idle: dict[tuple[str, str], float] = {}
    overlap = 0.0
    for low, high in itertools.pairwise(edges):
        length = high - low
        active = [stretch for stretch in real if stretch.start <= low < stretch.end]
        ranks: dict[str, float] = {}
        for stretch in active:
            if stretch.kind == COMPUTE:
                ranks[stretch.process] = min(1.0, ranks.get(stretch.process, 0.0) + stretch.density)
        free = 1.0
        for share in ranks.values():
            free *= 1 - share
        overlap += length * (sum(ranks.values()) - (1 - free))
        for key, share in _claims(active, free):
            idle[key] = idle.get(key, 0.0) + length * share
    return idle, overlap


def _claims(active: Sequence[_Stretch], free: float) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the (kind, node) and the shares of a moment in which nothing ran, which is the share `free` of it."""
    # The time in a queue excludes the steps of the request, so that all of it lies in the free time.
    queued = min(free, max((stretch.density for stretch in active if stretch.kind == QUEUE), default=0.0))
    yield (QUEUE, ""), queued
    free -= queued
    moved = free * max((stretch.density for stretch in active if stretch.kind == TRANSFER), default=0.0)
    yield (TRANSFER, ""), moved
    free -= moved
    waits: dict[str, float] = {}
    for stretch in active:
        if stretch.kind in (WAIT, STALL):
            waits[stretch.node] = min(1.0, waits.get(stretch.node, 0.0) + stretch.density)
    total = sum(waits.values())
    for node, share in waits.items():
        yield (WAIT, node), free * share / max(1.0, total)
    yield (BETWEEN, ""), free * max(0.0, 1 - total)
