"""Hosts of a deployment around their ranks: frames, or a line above the lines of their ranks. Pure functions."""

from __future__ import annotations

from mstar_core.observe.frames import HostStatus
from mstarctl.output.line import Line, fit, line, over, pair, safe, take
from mstarctl.output.units import age_text, size_text
from mstarctl.top.data.view import NORMAL, TINY, View
from mstarctl.top.drawing import numbers
from mstarctl.top.layout import ranks
from mstarctl.top.layout.header import state_mark


def blocks(view: View, width: int, height: int, size: int, chosen: str | None = None) -> list[Line]:
    """Draw all ranks by host in at most `height` lines; without other hosts, as `ranks.blocks` does.

    The hosts are framed, else a line each above the lines of their ranks, else a name in those lines.
    """
    if not view.hosts:
        return ranks.blocks(view, width, height, size, chosen)
    for rows in (_framed(view, width, chosen) if size >= NORMAL else None, _listed(view, width, size, chosen)):
        if rows and len(rows) <= height:
            return rows
    return ranks.folded(view, view.rank_keys, width, height, size, chosen, names_host=True)


def _framed(view: View, width: int, chosen: str | None) -> list[Line]:
    rows: list[Line] = []
    for place, host in enumerate(view.hosts):
        if place:
            rows += ranks.across(view, view.hosts[place - 1], width)
        rows += frame(view, host, width, chosen)
    return rows


def frame(view: View, host: str, width: int, chosen: str | None) -> list[Line]:
    """Draw a host with its ranks; one without a current agent dimmed, except its title."""
    corner_a, corner_b, corner_c, corner_d, flat, tall = tuple(view.glyphs.frame)
    title = line((f"{corner_a} ", "frame")) + take(host_facts(view, host), width - 4)
    inner = ranks.framed(view, _ranks_of(view, host), width - 4, chosen) or [line(("no rank runs here", "dim"))]
    body = [line((f"{tall} ", "frame"), fit(row, width - 4), (f" {tall}", "frame")) for row in inner]
    return [
        title + line((" " + flat * (width - title.width - 2) + corner_b, "frame")),
        *(body if view.is_reached(host) else [over(row, "off") for row in body]),
        line((corner_c + flat * (width - 2) + corner_d, "frame")),
    ]


def _listed(view: View, width: int, size: int, chosen: str | None) -> list[Line] | None:
    if size == TINY:
        return None
    rows: list[Line] = []
    for host in view.hosts:
        rows.append(fit(line(" ") + take(host_facts(view, host), width - 2), width))
        for key in _ranks_of(view, host):
            rows += ranks.folded(view, [key], width, 1, size, chosen)
    return [*rows, ranks.legend(view, width)] if view.store.nodes else rows


def _ranks_of(view: View, host: str) -> list[str]:
    return [key for key in view.rank_keys if view.host_of(key) == host]


def host_facts(view: View, host: str) -> list[Line]:
    """Return the parts of a host's line, most important first: name, state with its reason, address, loads."""
    status = view.store.hosts.get(host, HostStatus())
    is_titled = bool(status.title) and status.title != host
    name = line((safe(host), "strong"), (f" ({safe(status.title)})" if is_titled else "", "dim"))
    parts = [name + line(" ") + state_mark(status.state, view)]
    if status.reason:
        parts.append(line((safe(status.reason), "bad" if status.state == "lost" else "warn")))
    if status.address:
        parts.append(line((safe(status.address), "dim")))
    if view.is_reached(host):
        return [*parts, *_loads(status)]
    if status.heard is not None:
        parts.append(line((f"last reading {age_text(view.t - status.heard)} ago", "dim")))
    return parts


def _loads(status: HostStatus) -> list[Line]:
    parts = []
    if status.cores:
        parts.append(pair("cores", f"{sum(status.cores):.1f}/{len(status.cores)}"))
    if status.memory_total:
        parts.append(pair("mem", numbers.amount(status.memory_used, status.memory_total)))
    if status.round_trip_ms is not None:
        parts.append(pair("round trip", numbers.ms(status.round_trip_ms), unit="ms"))
    parts.append(pair("net in", f"{size_text(status.net_in_s)}/s") + pair(" out", f"{size_text(status.net_out_s)}/s"))
    return parts
