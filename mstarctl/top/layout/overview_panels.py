"""Panels for free rows of the overview: the live graph with its devices, and curves of the deployment."""

from __future__ import annotations

from typing import Final

from mstarctl.output.line import Line, fit, line, safe, take
from mstarctl.top.data.pace import answers_at_once
from mstarctl.top.data.view import NORMAL, View
from mstarctl.top.layout.graph.geometry import graph_of
from mstarctl.top.layout.graph.screen import drawing
from mstarctl.top.layout.ranks import Curve, charts, gpu_of

LEAST_ROWS: Final = 6
"""Rows of the smallest chart: title, four rows of values, time."""

MOST_ROWS: Final = 9
SIDE_BY_SIDE: Final = 3


def panels(view: View, width: int, room: int, size: int) -> list[Line]:
    """Draw what fits into `room` lines: the graph, then curves below it. Empty if neither fits."""
    if size < NORMAL or room < LEAST_ROWS + 1:
        return []
    picture = graph_panel(view, width, room - 1)
    left = room - len(picture) - (2 if picture else 1)
    known = deployment_curves(view)
    has_values = any(value is not None for curve in known for value in curve.values)
    has_room = left >= LEAST_ROWS and has_values
    curves = charts(view, known, width, min(left, MOST_ROWS), SIDE_BY_SIDE) if has_room else []
    rows: list[Line] = []
    for part in (picture, curves):
        rows += [fit(line(), width), *part] if part else []
    return rows


def graph_panel(view: View, width: int, height: int) -> list[Line]:
    """Draw a title with the device of each rank, and the graph; nothing if it does not fit."""
    graph = graph_of(view)
    body = drawing(view, graph, "", "", width, height - 1) if graph.nodes else None
    return [] if body is None else [devices_line(view, width), *body]


def devices_line(view: View, width: int) -> Line:
    """Draw `Graph   rank 0 on gpu0 NVIDIA H200   rank 1 on cpu`."""
    parts = [line(("Graph", "head"))]
    for rank in (view.store.ranks[key] for key in view.rank_keys):
        gpu = gpu_of(view, rank)
        device = rank.device if gpu is None else f"gpu{gpu.index} {gpu.name}".rstrip()
        device = f"{view.host_of(rank.rank)} {device}" if view.hosts else device
        parts.append(line((f"rank {rank.rank}", "value"), (f" on {safe(device)}", "dim")))
    return fit(line(" ") + take(parts, width - 2, "   "), width)


def deployment_curves(view: View) -> list[Curve]:
    """Return the curves of a deployment: throughput, time to the first output, load of its busiest rank."""
    head = view.store.deployment
    busiest = max(view.store.ranks.values(), key=lambda rank: rank.busy, default=None)
    is_whole = answers_at_once(view.kinds)
    name, unit, now = throughput(view)
    result = [
        Curve(title=name, values=view.recent("deployment", "", _field(view)), now=now, unit=unit),
        Curve(
            title="latency" if is_whole else "TTFT",
            values=view.recent("deployment", "", "ttft_p50_ms"),
            now=head.ttft_p50_ms,
            unit="ms",
        ),
    ]
    if busiest is not None:
        values = view.recent("ranks", str(busiest.rank), "busy")
        title = f"rank {busiest.rank} busy"
        result.append(Curve(title=title, values=values, now=busiest.busy, unit="%", top=100.0, scale=100.0))
    return result


def _field(view: View) -> str:
    kinds = view.kinds
    return "tokens_s" if "text" in kinds else "audio_x" if "audio" in kinds else "requests_s"


def throughput(view: View) -> tuple[str, str, float]:
    """Return (title, unit, value) of what the model makes: tokens, seconds of sound, or answers."""
    head = view.store.deployment
    match _field(view):
        case "tokens_s":
            return "text", "tok/s", head.tokens_s
        case "audio_x":
            return "audio", "x", head.audio_x
    return "answers", "/s", head.requests_s
