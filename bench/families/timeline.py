"""Timeline of a device during one run: the slowest kernels, and idle gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.families.clock import family, wait

MOST_NAMED = 15
NAME_LENGTH = 110


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One kernel or copy. start, end: seconds on the profiler's clock."""

    start: float
    end: float
    name: str


def timeline(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profile one run. On the CPU the spans are leaf operations, for trying the benchmark."""
    on_gpu = device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    wait(device)
    with torch.profiler.profile(activities=[kinds.CUDA if on_gpu else kinds.CPU]) as profile:
        run()
        wait(device)
    found = [
        Span(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in profile.events() or ()
        if event.device_type.name == ("CUDA" if on_gpu else "CPU") and not event.cpu_children
    ]
    return told(found)


def told(spans: Sequence[Span]) -> dict[str, Any]:
    """Return the timeline's figures.

    span_s: from the first kernel's start to the last one's end; busy_s: the part of it with at least one kernel;
    idle_s: the rest. by_family_s and slowest count each kernel's own time; overlapping kernels count twice. gaps: the
    longest gaps, with the kernels before and after them; gaps_us: number of gaps above each length in microseconds.
    """
    if not spans:
        return {"launches": 0}
    ordered = sorted(spans)
    busy, gaps, end, last = 0.0, list[tuple[float, str, str]](), ordered[0].start, ""
    for span in ordered:
        if span.start > end and last:
            gaps.append((span.start - end, last, span.name))
        busy += max(0.0, span.end - max(span.start, end))
        if span.end > end:
            end, last = span.end, span.name
    length = end - ordered[0].start
    by_family: dict[str, float] = {}
    by_name: dict[str, tuple[float, int]] = {}
    for span in ordered:
        own = span.end - span.start
        by_family[family(span.name)] = by_family.get(family(span.name), 0.0) + own
        seconds, count = by_name.get(span.name, (0.0, 0))
        by_name[span.name] = (seconds + own, count + 1)
    slowest = sorted(by_name.items(), key=lambda each: -each[1][0])[:MOST_NAMED]
    gaps.sort(reverse=True)
    return {
        "span_s": length,
        "busy_s": busy,
        "idle_s": length - busy,
        "launches": len(ordered),
        "by_family_s": by_family,
        "slowest": [{"name": n[:NAME_LENGTH], "s": s, "calls": c} for n, (s, c) in slowest],
        "gaps": [{"s": s, "after": a[:NAME_LENGTH], "before": b[:NAME_LENGTH]} for s, a, b in gaps[:MOST_NAMED]],
        "gaps_us": {str(least): sum(s * 1e6 > least for s, _, _ in gaps) for least in (2, 5, 20, 100)},
    }
