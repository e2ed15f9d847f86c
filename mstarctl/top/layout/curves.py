"""Charts of the last five minutes, filled with block glyphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.observe.frames import RankStatus
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import area, nice_top
from mstarctl.top.drawing.line import Line, fit, left, line, right, safe

AXIS: Final = 6
"""Cells of the labels at the left of a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One chart. top: value of the upper edge, None to fit the values. scale: factor of the displayed values.

    now: the current value; the newest of `values` may be one second old.
    """

    title: str
    values: Sequence[float | None]
    now: float | None
    unit: str = ""
    top: float | None = None
    scale: float = 1.0


def curves(view: View, rank: RankStatus) -> list[Curve]:
    """Return the curves of a rank: device load, steps and rows of its busiest node, pages."""
    key = str(rank.rank)
    gpu = view.store.gpus.get(rank.gpu) if rank.gpu is not None else None
    if gpu is not None and rank.gpu is not None:
        found = [_share("util", view.recent("gpus", rank.gpu, "util"), gpu.util)]
    else:
        found = [_share("busy", view.recent("ranks", key, "busy"), rank.busy)]
    nodes = view.nodes_of(rank.rank)
    if nodes:
        at, node = max(nodes, key=lambda pair: (pair[1].slots_total > 0, pair[1].busy))
        steps, rows = view.recent("nodes", at, "step_ms"), view.recent("nodes", at, "batch")
        found.append(Curve(title=f"{node.name} step", values=steps, now=node.step_ms, unit="ms"))
        found.append(Curve(title=f"{node.name} rows", values=rows, now=node.batch))
    if rank.pages_total:
        found.append(_share("pages", view.recent("ranks", key, "pages"), rank.pages_used / rank.pages_total))
    return found


def _share(title: str, values: Sequence[float | None], now: float | None) -> Curve:
    return Curve(title=title, values=values, now=now, unit="%", top=100.0, scale=100.0)


def charts(view: View, found: Sequence[Curve], width: int, height: int, side_by_side: int) -> list[Line]:
    """Draw charts next to each other, at most `side_by_side`: `height` lines of `width` cells."""
    shown = found[:side_by_side]
    if not shown:
        return []
    each = (width - 2 - 2 * (len(shown) - 1)) // len(shown)
    rows = [line(" ")] * height
    for at, curve in enumerate(shown):
        drawn = chart(view, curve, each, height)
        rows = [row + line("  " if at else "", body) for row, body in zip(rows, drawn, strict=True)]
    return [fit(row, width) for row in rows]


def chart(view: View, curve: Curve, width: int, height: int) -> list[Line]:
    """Draw `height` (at least 3) lines of `width` cells: title with the current value, area, time axis."""
    values = [None if value is None else value * curve.scale for value in curve.values]
    top = curve.top if curve.top is not None else nice_top(values)
    high = height - 2
    labels = {high - 1: "0", 0: f"{top:g}"} | ({high // 2: f"{top / 2:g}"} if high >= 4 else {})
    rows = [fit(line((safe(curve.title), "head"), "  ", (_now(curve), "strong")), width)]
    if all(value is None for value in values):  # a scale needs values
        rows += [
            fit(line((" " * AXIS, ""), ("no figures" if index == 0 else "", "dim")), width) for index in range(high)
        ]
        return [*rows, fit(line(), width)]
    for index, body in enumerate(area(values, width - AXIS, high, top, view.glyphs)):
        rows.append(fit(line((right(labels.get(index, ""), AXIS - 1), "faint"), " ") + body, width))
    return [*rows, time_axis(view, len(values), width)]


def _now(curve: Curve) -> str:
    if curve.now is None:
        return numbers.NONE
    value = curve.now * curve.scale
    return f"{numbers.ms(value) if curve.unit == 'ms' else f'{value:.0f}'} {curve.unit}".rstrip()


def time_axis(view: View, values: int, width: int) -> Line:
    """Draw `-5m00s` under the oldest value, `now` under the newest."""
    span = view.history.span_s
    ago = f"-{span // 60}m{span % 60:02d}s" if span >= 60 else f"-{span}s" if span else ""
    start = AXIS + max(0, width - AXIS - max(values, len(ago) + 4))
    return fit(line((left(" " * start + ago, width - 3), "faint"), ("now", "faint")), width)
