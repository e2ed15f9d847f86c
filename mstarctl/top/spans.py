"""From the spans of a request, as the admin socket gives them, to the lanes of a waterfall. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstarctl.output.units import size_text
from mstarctl.top import figures
from mstarctl.top.layout.waterfall import KINDS, Bar, Lane

MOST_BARS: Final = 400


def lanes(spans: Sequence[Mapping[str, Any]], started: float, now: float) -> tuple[Lane, ...]:
    """A lane for each process, node and walk, by their first span; edges after the node that feeds them.

    started, now: seconds of the deployment's clock; an open span ends now.
    """
    grouped: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for span in sorted(spans, key=lambda span: float(span.get("start", 0.0))):
        is_moved = span.get("kind") == "transfer"
        walk = "" if is_moved else str(span.get("walk", ""))
        grouped.setdefault((place(span), str(span.get("node", "")), walk), []).append(span)
    return tuple(_lane(key, found, started, now) for key, found in grouped.items())


def place(span: Mapping[str, Any]) -> str:
    """`api`, `rank 1`, `1 > 0`."""
    if span.get("place"):
        return str(span["place"])
    source, into = span.get("source_rank"), span.get("into_rank")
    if source is not None and into is not None and source != into:
        return f"{source} > {into}"
    rank = span.get("rank")
    if rank is not None:
        return f"rank {rank}"
    child = str(span.get("child") or span.get("from") or "")
    return f"rank {child.removeprefix('worker-')}" if child.startswith("worker-") else child or "-"


def _lane(key: tuple[str, str, str], spans: Sequence[Mapping[str, Any]], started: float, now: float) -> Lane:
    where, node, walk = key
    bars = []
    for span in spans[-MOST_BARS:]:
        start = float(span.get("start", started))
        end = now if span.get("is_open") else float(span.get("end", start))
        kind = str(span.get("kind", "compute"))
        bars.append(
            Bar(
                kind=kind if kind in KINDS else "compute",
                start_ms=1000 * (start - started),
                end_ms=1000 * (max(start, end) - started),
            )
        )
    label = node if not walk or walk == node else f"{node} {walk}"
    return Lane(place=where, label=label, bars=tuple(bars), note=note(spans), node=node)


def note(spans: Sequence[Mapping[str, Any]]) -> str:
    """`312 steps, b14, 5.2 ms`, `2.4 MiB`, `53.0 ms`."""
    work = [span for span in spans if span.get("kind") in ("compute", "transfer")]
    if not work:
        return ""
    moved = sum(int(span.get("size_bytes", 0)) for span in work)
    if any(span.get("kind") == "transfer" for span in work):
        return size_text(moved) if moved else ""
    steps = sum(int(span.get("count", 1)) for span in work)
    spent = sum(1000 * (float(span.get("end", 0)) - float(span.get("start", 0))) for span in work)
    batch = int(work[-1].get("batch", 0))
    words = [f"{steps} steps"] if steps > 1 else []
    words += [f"b{batch}"] if batch > 1 else []
    words.append(f"{figures.ms(spent / max(1, steps))} ms")
    return ", ".join(words)
