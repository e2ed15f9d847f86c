"""Ranks: blocks with device load and nodes, and the screen of one rank with memory, pages and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.observe.frames import EdgeStatus, GpuStatus, NodeStatus, RankStatus
from mstarctl.output.line import (
    EMPTY,
    Line,
    clip,
    clip_inside,
    fit,
    join,
    left,
    line,
    over,
    pair,
    right,
    safe,
    take,
    window,
)
from mstarctl.output.units import counted, size_text
from mstarctl.top.data.view import NORMAL, TINY, View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import area, bar, nice_top, spark, stacked

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HOST_CELLS: Final = 14
"""Most cells of the name of a host in the line of a rank."""


def blocks(view: View, width: int, height: int, size: int, chosen: str | None = None) -> list[Line]:
    """Draw all ranks in at most `height` lines: framed, else one line each, else with `6 more ranks`."""
    if size >= NORMAL:
        rows = framed(view, view.rank_keys, width, chosen)
        if len(rows) <= height:
            return rows
    return folded(view, view.rank_keys, width, height, size, chosen)


def framed(view: View, keys: list[str], width: int, chosen: str | None) -> list[Line]:
    """Draw a frame for each of these ranks, which are on one host, with the edges between them."""
    rows: list[Line] = []
    links = between(view, keys, width)
    for index, key in enumerate(keys):
        if index:
            rows += links[index - 1]
        rows += block(view, view.store.ranks[key], width, is_chosen=key == chosen)
    return rows


# -- one frame ----------------------------------------------------------------------------------------------------


def block(view: View, rank: RankStatus, width: int, *, is_chosen: bool = False) -> list[Line]:
    """Draw a framed rank."""
    corner_a, corner_b, corner_c, corner_d, flat, tall = tuple(view.glyphs.box)
    role = "accent" if is_chosen else "frame"
    title = line((f"{corner_a} ", role)) + take(load(view, rank, 21 if width >= 110 else 12), width - 4)
    title = title + line((" " + flat * (width - title.width - 2) + corner_b, role))
    rows = [title]
    for inner in node_rows(view, rank, width - 4):
        rows.append(line((f"{tall} ", role), inner, (f" {tall}", role)))
    rows.append(line((corner_c + flat * (width - 2) + corner_d, role)))
    return [over(row, "off") for row in rows] if view.is_ended(rank.rank) else rows


def gpu_of(view: View, rank: RankStatus) -> GpuStatus | None:
    """Return the GPU of a rank."""
    return view.store.gpus.get(rank.gpu) if rank.gpu is not None else None


def load(view: View, rank: RankStatus, bar_width: int, *, names_host: bool = False) -> list[Line]:
    """Return the parts of a frame's title, most important first: rank, device, utilisation, memory, pages, power."""
    gpu = gpu_of(view, rank)
    device = f"gpu{gpu.index} {short_gpu(gpu.name)}" if gpu is not None else rank.device
    device = f"{view.host_of(rank.rank)} {device}" if names_host and view.hosts else device
    share, word = (gpu.util, "util") if gpu is not None and gpu.util is not None else (rank.busy, "busy")
    used, total = (rank.memory_used or rank.resident_bytes, rank.memory_total)
    if gpu is not None and gpu.memory_used is not None:
        used, total = gpu.memory_used, gpu.memory_total
    parts = [
        line((f"rank {rank.rank}", "strong")),
        line((safe(device), "dim")),
        line((f"{word} ", "dim"), bar(share, bar_width, view.glyphs), (f" {numbers.percent(share):>5}", _hot(share))),
        pair("mem", numbers.amount(used, total)),
    ]
    if rank.pages_total:
        full = rank.pages_used / rank.pages_total
        parts.append(line(("pages ", "dim"), (f"{rank.pages_used}/{rank.pages_total}", _hot(full))))
    if gpu is not None and gpu.power_w is not None:
        parts.append(line((f"{gpu.power_w:.0f} W", "dim")))
    if rank.core is not None and gpu is None:
        parts.append(pair("core", numbers.percent(rank.core)))
    if rank.state not in ("ready", ""):
        parts.insert(1, line((rank.state, "warn")))
    if len(rank.group) > 1 and rank.group[0] == rank.rank:
        parts.append(pair("group", " ".join(map(str, rank.group))))
    if gpu is not None and gpu.is_stale:
        parts.append(line(("stale readings", "warn")))
    return parts


def short_gpu(name: str) -> str:
    """Shorten `NVIDIA H100 80GB HBM3` to `H100`."""
    words = [word for word in name.split() if word not in ("NVIDIA", "GeForce", "Tesla")]
    return words[0] if words else ""


def _hot(share: float | None) -> str:
    return "hot" if share is not None and share > 0.75 else "value"


# -- nodes --------------------------------------------------------------------------------------------------------


def node_rows(view: View, rank: RankStatus, width: int) -> list[Line]:
    """Draw a rank's nodes, stateless ones two in a line."""
    nodes = view.nodes_of(rank.rank)
    if not nodes:
        return [fit(start_line(view, rank, width), width)]
    name_width = min(18, max(len(node.name) for node in view.store.nodes.values()) + 1)
    rows: list[Line] = []
    pending: Line | None = None
    for key, node in nodes:
        if node.slots_total or node.pages_total or node.ahead_s is not None or node.underruns is not None:
            if pending is not None:
                rows.append(pending)
                pending = None
            rows.append(node_line(view, key, node, width, name_width))
        elif pending is None:
            pending = node_line(view, key, node, width // 2 - 1, name_width)
        else:
            rows.append(pending + line("  ") + node_line(view, key, node, width - pending.width - 2, name_width))
            pending = None
    if pending is not None:
        rows.append(pending)
    return [fit(row, width) for row in rows]


def start_line(view: View, rank: RankStatus, width: int) -> Line:
    """Draw the start-up phase of a rank with a bar, or the names of its nodes."""
    child = next((c for c in view.store.children.values() if c.rank == rank.rank), None)
    names = line((" ".join(safe(name) for name in rank.nodes), "dim"))
    if rank.follows and not rank.nodes:
        names = take(follower_facts(rank), width)
    if child is None or not child.phase or child.state == "ready":
        return names
    share = child.done / child.total if child.total else None
    amount = (
        ""
        if not child.total
        else (numbers.amount(child.done, child.total) if child.total > 10**6 else f"{child.done}/{child.total}")
    )
    meter = line((f"{child.phase} ", "value"), bar(share, max(8, min(36, width // 3)), view.glyphs, "accent"))
    return take([names, meter, line((amount, "value")), line((safe(child.detail), "faint"))], width)


def follower_facts(rank: RankStatus) -> list[Line]:
    """Return `follows rank 0  LLM  epoch 2  plans 12345` in parts, for a rank that serves no node itself."""
    leader = rank.group[0] if rank.group else 0
    return [
        line((f"follows rank {leader}", "value")),
        line((" ".join(safe(name) for name in rank.follows), "dim")),
        pair("epoch", str(rank.epoch)),
        pair("plans", f"{rank.plans}"),
    ]


def node_line(view: View, key: str, node: NodeStatus, width: int, name_width: int) -> Line:
    """Draw `Thinker ▇█▇█ b14 5.2 ms/step 1 prefill 13 decode graphs 98.7 % queue 3 ◀ bottleneck`."""
    busy = spark(view.recent("nodes", key, "busy"), 8, view.glyphs, peak=1.0)
    start = line((left(safe(node.name), name_width), view.node_role(node.name)), (busy, "spark"), "  ")
    end = line((f"{view.glyphs.bottleneck} bottleneck", "hot")) if node.is_bottleneck else EMPTY
    room = width - start.width - (end.width + 2 if end.spans else 0)
    row = start + take(_node_facts(view, key, node), room)
    if not end.spans:
        return fit(row, width)
    return fit(row, width - end.width) + end if row.width + end.width <= width else fit(row, width)


def _node_facts(view: View, key: str, node: NodeStatus) -> list[Line]:
    if node.step_ms is None and not node.batch:
        return [line(("idle", "faint")), *_playback(node)]
    batch = line((f"{'b' + str(node.batch):<4}", "value"))
    unit = "ms/chunk" if node.ahead_s is not None else "ms/step" if node.slots_total else "ms"
    facts = [batch, line((f"{numbers.ms(node.step_ms):>5}", "value"), (f" {unit}", "dim"))]
    facts.append(join([line((str(n), "value"), (f" {safe(walk)}", "dim")) for walk, n in _busiest(node.walks)]))
    if node.graph_share is not None:
        facts.append(pair("graphs", f"{100 * node.graph_share:.1f} %"))
    if node.slots_total or node.queue or node.waiting:
        waiting = node.queue + node.waiting
        trail = spark(view.recent("nodes", key, "queue")[-4:], 4, view.glyphs) if waiting else ""
        facts.append(line(("queue ", "dim"), (str(waiting), "warn" if waiting else "value"), (f" {trail}", "spark")))
    return facts + _playback(node)


def _busiest(walks: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((walk, n) for walk, n in walks.items() if n), key=lambda pair: (-pair[1], pair[0]))[:2]


def _playback(node: NodeStatus) -> list[Line]:
    if node.ahead_s is None:
        return underruns(node)
    role = "warn" if node.ahead_s < 0.1 else "value"
    return [pair("least ahead", f"{node.ahead_s:.2f} s", role), *underruns(node)]


def underruns(node: NodeStatus) -> list[Line]:
    """Draw the underruns of a node that plays audio."""
    if node.underruns is None:
        return []
    return [pair("underruns", str(node.underruns), "bad" if node.underruns else "value")]


def step_times(node: NodeStatus) -> Line:
    """Draw the quantiles of a node's step time."""
    return pair("step p50", numbers.ms(node.step_p50_ms)) + pair(" p99", numbers.ms(node.step_p99_ms), unit="ms")


# -- edges --------------------------------------------------------------------------------------------------------


RULE: Final = 10
"""Index of the horizontal line in a set of lines."""

LINK_ROWS: Final = 2
"""Most lines of edges between two ranks, of two edges each."""


def between(view: View, keys: list[str], width: int) -> list[list[Line]]:
    """Return the lines between each of these ranks and the next: edges to later ones; animated by the view's phase."""
    place = {view.store.ranks[key].rank: at for at, key in enumerate(keys)}
    inside = [edge for edge in _crossing(view) if {edge.source_rank, edge.into_rank} <= place.keys()]
    first = [min(place[edge.source_rank], place[edge.into_rank]) for edge in inside]
    return [
        _links(view, [edge for edge, at in zip(inside, first, strict=True) if at == gap], width) or [line(" " * width)]
        for gap in range(len(keys) - 1)
    ]


def across(view: View, host: str, width: int) -> list[Line]:
    """Return the lines of edges between a host and later ones."""
    order = {name: at for at, name in enumerate(view.hosts)}
    edges = []
    for edge in _crossing(view):
        ends = sorted((order[view.host_of(edge.source_rank)], order[view.host_of(edge.into_rank)]))
        if ends[0] == order[host] < ends[1]:
            edges.append(edge)
    return _links(view, edges, width)


def _crossing(view: View) -> list[EdgeStatus]:
    edges = [edge for edge in view.store.edges.values() if edge.source_rank != edge.into_rank]
    return sorted(edges, key=lambda edge: (edge.source_rank, edge.into_rank, edge.name))


def _links(view: View, edges: list[EdgeStatus], width: int) -> list[Line]:
    """Draw edges, two in a line."""
    column_width = (width - 4) // max(1, min(2, len(edges)))
    pairs = [edges[at : at + 2] for at in range(0, len(edges), 2)][:LINK_ROWS]
    drawn = [join((edge_line(view, edge, column_width - 2) for edge in pair), "  ") for pair in pairs]
    return [fit(line("  ") + row, width) for row in drawn]


def edge_line(view: View, edge: EdgeStatus, width: int) -> Line:
    """Draw `hidden  412/s  2.4 MiB/s  0.1 ms  ──●──●──▶ Talker`."""
    facts = [
        line((safe(edge.name), "flow")),
        line((f"{numbers.rate(edge.items_s):>5}", "value"), ("/s", "dim")),
        line((f"{size_text(edge.bytes_s)}/s", "dim")),
    ]
    if edge.transfer_ms is not None:
        facts.append(line((f"{numbers.ms(edge.transfer_ms)} ms", "dim")))
    names = line((safe(edge.source), view.node_role(edge.source)), " ")
    into = line(" ", (safe(edge.into) or f"rank {edge.into_rank}", view.node_role(edge.into)))
    text = take(facts, max(0, width - into.width - names.width - 10))
    room = max(3, min(24, width - text.width - into.width - names.width - 2))
    is_remote = view.host_of(edge.source_rank) != view.host_of(edge.into_rank)
    return fit(text + line("  ") + names + flow(view, edge.items_s, room, is_remote=is_remote) + into, width)


def flow(view: View, items_s: float, width: int, *, is_remote: bool = False) -> Line:
    """Draw an arrow of `width` cells, dashed between hosts, with one moving dot per 50 items per second."""
    dots = 0 if items_s <= 0 else min(max(1, round(items_s / 50)), max(1, (width - 1) // 3))
    cells = [view.glyphs.dashed[RULE] if is_remote else view.glyphs.rule] * (width - 1)
    for dot in range(dots):
        cells[(dot * (width - 1) // dots + view.phase) % (width - 1)] = view.glyphs.dot
    return line(("".join(cells) + view.glyphs.arrow_right, "flow" if dots else "frame"))


# -- folded -------------------------------------------------------------------------------------------------------


def letters(view: View) -> dict[str, str]:
    """Return a letter for each node: the first free one of its name, else of the alphabet."""
    names = [node.name for node in view.store.graph.nodes] or sorted({n.name for n in view.store.nodes.values()})
    taken: dict[str, str] = {}
    for name in names:
        preferred = [c for c in name.upper() if c in LETTERS] + list(LETTERS)
        taken[name] = next((c for c in preferred if c not in taken.values()), "?")
    return taken


def folded(
    view: View,
    keys: list[str],
    width: int,
    height: int,
    size: int,
    chosen: str | None = None,
    *,
    names_host: bool = False,
) -> list[Line]:
    """Draw one line per rank, with a legend of the nodes' letters if there is room. names_host: before the device."""
    has_legend = size > TINY and height > len(keys)
    room = height - (1 if has_legend else 0)
    shown = keys if len(keys) <= room else keys[: max(1, room - 1)]
    host_width = min(HOST_CELLS, max(map(len, view.hosts), default=0)) if names_host else 0
    rows = [_folded(view, view.store.ranks[key], width, size, host_width, is_chosen=key == chosen) for key in shown]
    rows = [
        over(row, "off") if view.is_ended(view.store.ranks[key].rank) else row
        for key, row in zip(shown, rows, strict=True)
    ]
    if len(shown) < len(keys):
        rows.append(fit(line((f" {counted(len(keys) - len(shown), 'more rank')}", "dim")), width))
    if has_legend and view.store.nodes:
        rows.append(legend(view, width))
    return rows[:height]


def legend(view: View, width: int) -> Line:
    """Draw the letters of the nodes with their names."""
    named = [line((letter, view.node_role(name)), (f" {safe(name)}", "dim")) for name, letter in letters(view).items()]
    return fit(line("   ") + take(named, width - 4), width)


def _folded(view: View, rank: RankStatus, width: int, size: int, host_width: int, *, is_chosen: bool) -> Line:
    """Draw a rank in one line. host_width: cells of its host's name, 0 for none."""
    host = clip_inside(safe(view.host_of(rank.rank)), host_width) if host_width else ""
    gpu = gpu_of(view, rank)
    share = gpu.util if gpu is not None and gpu.util is not None else rank.busy
    pages = numbers.part(rank.pages_used, rank.pages_total)
    number = line((f"{view.glyphs.cursor if is_chosen else ' '}{rank.rank} ", "strong"))
    if size == TINY:
        text = f" {numbers.percent(share):>5}"
        tail = "" if pages is None else f" p{100 * pages:.0f}"
        room = max(4, width // 3 - 2)
        tail += f" {host}" if host else ""
        return fit(number + bar(share, room, view.glyphs) + line((text, _hot(share)), (tail, "dim")), width)
    device = f"gpu{gpu.index}" if gpu is not None else clip(rank.device, 6)
    used, total = (gpu.memory_used, gpu.memory_total) if gpu else (rank.memory_used, rank.memory_total)
    memory = numbers.part(used, total)
    named_host = f"{left(host, host_width)} " if host else ""
    start = number + line(
        (f"{named_host}{device:<6} ", "dim"),
        bar(share, 14, view.glyphs),
        (f" {numbers.percent(share):>5}", _hot(share)),
    )
    facts = [line(("mem ", "dim"), (numbers.percent(memory), _hot(memory)))]
    if pages is not None:
        facts.append(line(("pages ", "dim"), (numbers.percent(pages), _hot(pages))))
    named = letters(view)
    for _, node in view.nodes_of(rank.rank):
        batch = f"b{node.batch}" if node.batch else numbers.NONE
        step = f" {numbers.ms(node.step_ms)} ms" if node.slots_total and node.batch else ""
        mark = f" {view.glyphs.bottleneck}" if node.is_bottleneck else ""
        facts.append(
            line((named.get(node.name, "?"), view.node_role(node.name)), (f" {batch}{step}", "value"), (mark, "hot"))
        )
    if view.is_ended(rank.rank):
        facts = [line((rank.state, "bad"))]
    if not view.nodes_of(rank.rank):
        facts.append(start_line(view, rank, width - start.width - 24))
    return fit(start + line("  ") + take(facts, width - start.width - 2), width)


def ranks_page(view: View, width: int, height: int, size: int, chosen: str | None) -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines, keys of the ranks in the first ones). The chosen rank is shown in full."""
    keys = view.rank_keys
    if not keys:
        return window([line(), line(("  no rank has reported yet", "dim"))], height, width), []
    key = chosen if chosen in view.store.ranks else keys[0]
    room = max(2, min(len(keys), height // 3))
    at = keys.index(key)
    first = max(0, min(at - room + 1, len(keys) - room))
    shown = keys[first : first + room]
    rows = [row for one in shown for row in folded(view, [one], width, 1, size, chosen=key, names_host=True)]
    if size > TINY:
        rows.append(legend(view, width))
        rows.append(line((view.glyphs.rule * width, "frame")))
    rows += rank_facts(view, view.store.ranks[key], width, size)
    room = height - len(rows) - 1
    if size > TINY and room >= 5:
        rows.append(line())
        rows += charts(view, curves(view, view.store.ranks[key]), width, min(room, 16), 3 if size >= NORMAL else 2)
    return window(rows, height, width), shown


def rank_facts(view: View, rank: RankStatus, width: int, size: int) -> list[Line]:
    """Draw all facts of a rank except its curves."""
    rows = [line(" ") + take(load(view, rank, 21 if size >= NORMAL else 10, names_host=True), width - 2)]
    child = next((c for c in view.store.children.values() if c.rank == rank.rank), None)
    gpu = gpu_of(view, rank)
    parts = [
        pair("pid", str(rank.pid or numbers.NONE)),
        pair("steps", f"{numbers.rate(rank.steps_s)}/s"),
        pair("requests", str(rank.requests)),
        pair("core", numbers.percent(rank.core)),
        pair("resident", numbers.size(rank.resident_bytes)),
        pair("shared memory", numbers.size(rank.shm_bytes)),
    ]
    if child is not None and child.restarts:
        parts.append(pair("restarts", str(child.restarts), "warn"))
    if gpu is not None:
        parts += [
            line(("", "dim"), (f"{gpu.temperature_c:.0f} °C", "value")) if gpu.temperature_c is not None else line(),
            line((f"{gpu.clock_mhz:.0f} MHz", "value")) if gpu.clock_mhz is not None else line(),
            pair("limit", f"{gpu.power_limit_w:.0f} W") if gpu.power_limit_w else line(),
        ]
    rows.append(line(" ") + take([part for part in parts if part.spans], width - 2))
    if size == TINY:
        return rows
    rows += [
        fit(line(" ") + take(details, width - 2), width)
        for details in (gpu_details(view, gpu), host_loads(view, view.host_of(rank.rank)))
        if details
    ]
    rows += [line(), *memory(view, rank, width), *pages(view, rank, width), line()]
    rows += [node_facts(view, node, width) for _, node in view.nodes_of(rank.rank)]
    return rows


def gpu_details(view: View, gpu: GpuStatus | None) -> list[Line]:
    """Return PCIe rates, fan, lowered clocks, memory errors, MIG, and the processes of others, as far as known."""
    if gpu is None:
        return []
    parts = (
        [line(("warning: ", "warn"), (f"clock lowered by {' and '.join(gpu.throttle)}", "warn"))]
        if gpu.throttle
        else []
    )
    if gpu.pcie_in_s is not None:
        parts.append(in_out(view, "PCIe", gpu.pcie_in_s, gpu.pcie_out_s or 0))
    if gpu.fan is not None:
        parts.append(pair("fan", numbers.percent(gpu.fan)))
    if gpu.ecc_errors is not None:
        parts.append(pair("ECC errors", str(gpu.ecc_errors), "bad" if gpu.ecc_errors else "value"))
    if gpu.is_mig:
        parts.append(line(("MIG: figures are of the whole card", "warn")))
    ours = {str(child.pid) for child in view.store.children.values() if child.host == gpu.host}
    ours |= {str(rank.pid) for rank in view.store.ranks.values() if rank.host == gpu.host}
    others = [
        f"{safe(name) or f'pid {pid}'} {size_text(used)}"
        for pid, (name, used) in gpu.processes.items()
        if pid not in ours
    ]
    return [*parts, pair("others", ", ".join(others), "warn")] if others else parts


def host_loads(view: View, name: str) -> list[Line]:
    """Return the loads of a host: cores, memory, swap, network, disks. Empty if they are not known."""
    host = view.store.hosts.get(name)
    if host is None or not host.memory_total:
        return []
    title = f"host {safe(name)} " if view.hosts else "host "
    parts = [line((title, "head"), pair("memory", numbers.amount(host.memory_used, host.memory_total)))]
    if host.cores:
        mean = sum(host.cores) / len(host.cores)
        busiest = sorted(host.cores, reverse=True)[:MOST_CORES]
        drawn = spark(
            host.cores if len(host.cores) <= MOST_CORES else busiest,
            min(len(host.cores), MOST_CORES),
            view.glyphs,
            peak=1.0,
        )
        parts.append(
            line(("cores ", "dim"), (drawn, "spark"), (f" {numbers.percent(mean)} of {len(host.cores)}", "value"))
        )
    if host.swap_total:
        role = "warn" if host.swap_used > host.swap_total / 2 else "value"
        parts.append(pair("swap", numbers.amount(host.swap_used, host.swap_total), role))
    parts.append(in_out(view, "network", host.net_in_s, host.net_out_s))
    parts.append(in_out(view, "disk", host.disk_read_s, host.disk_write_s))
    return parts


def in_out(view: View, name: str, got: float, sent: float) -> Line:
    """Draw `network in 1.2 MiB/s out 3.4 MiB/s`; of a disk, in is what it reads."""
    return line(
        (f"{name} ", "dim"),
        ("in ", "faint"),
        (f"{size_text(got)}/s", "value"),
        (" out ", "faint"),
        (f"{size_text(sent)}/s", "value"),
    )


def memory(view: View, rank: RankStatus, width: int) -> list[Line]:
    """Draw the device's memory by owner: weights, caches, rest of this process, other processes, free."""
    gpu = gpu_of(view, rank)
    total = gpu.memory_total if gpu is not None else rank.memory_total
    if not total or rank.memory_used is None:
        return []
    used = max(rank.memory_used, gpu.memory_used or 0) if gpu is not None else rank.memory_used
    weights, caches = rank.weights_bytes or 0, rank.cache_bytes or 0
    rest = max(0, rank.memory_used - weights - caches)
    others = max(0, used - rank.memory_used)
    full, spans = view.glyphs.full, view.glyphs.spans
    parts = [
        (weights, full, "bar", "weights"),
        (caches, spans["stall"], "flow", "caches"),
        (rest, spans["transfer"], "node.4", "other"),
        (others, spans["queue"], "node.3", "other processes"),
    ]
    row = line((" memory ", "dim")) + stacked(
        [(n / total, glyph, role) for n, glyph, role, _ in parts],
        max(8, width - 10),
        view.glyphs.rest if view.glyphs.is_ascii else " ",
    )
    words = [line((glyph, role), (f" {name} ", "dim"), (size_text(n), "value")) for n, glyph, role, name in parts if n]
    words.append(line(("free ", "dim"), (size_text(max(0, total - used)), "value"), (f" of {size_text(total)}", "dim")))
    return [row, line(" " * 8) + take(words, width - 9, "   ")]


def pages(view: View, rank: RankStatus, width: int) -> list[Line]:
    """Draw the pages of the rank's caches: used, cached prefixes, free, and those under the leases of sessions."""
    if not rank.pages_total:
        return []
    room = max(8, width - 10)
    parts = [
        (rank.pages_used / rank.pages_total, view.glyphs.full, "bar"),
        (rank.pages_cached / rank.pages_total, view.glyphs.spans["transfer"], "flow"),
    ]
    free = max(0, rank.pages_total - rank.pages_used - rank.pages_cached)
    words = [
        line((view.glyphs.full, "bar"), (" used ", "dim"), (str(rank.pages_used), "value")),
        line((view.glyphs.spans["transfer"], "flow"), (" cached ", "dim"), (str(rank.pages_cached), "value")),
        line(("free ", "dim"), (str(free), "value"), (f" of {rank.pages_total}", "dim")),
        *([line(("leased ", "dim"), (str(rank.pages_leased), "value"))] if rank.pages_leased else []),
    ]
    return [
        line((" pages  ", "dim")) + stacked(parts, room, view.glyphs.rest if view.glyphs.is_ascii else " "),
        line(" " * 8) + take(words, width - 9, "   "),
    ]


def node_facts(view: View, node: NodeStatus, width: int) -> Line:
    """Draw the step times of a node, and its steps without a CUDA graph by kind."""
    parts = [
        step_times(node),
        line((f"b{node.batch}", "value")),
        line((numbers.rate(node.steps_s), "value"), (" steps/s", "dim")),
    ]
    if node.graph_share is not None:
        eager = 1 - node.graph_share
        why = ", ".join(f"{safe(reason)}: {n}" for reason, n in sorted(node.eager.items(), key=lambda pair: -pair[1]))
        parts.append(
            line(
                ("replayed ", "dim"),
                (f"{100 * node.graph_share:.1f} %", "value"),
                ("  eager ", "dim"),
                (f"{100 * eager:.1f} %", "warn" if eager > 0.1 else "value"),
                (f" ({why})" if why else "", "dim"),
            )
        )
    elif node.eager:
        parts.append(pair("eager:", ", ".join(f"{safe(k)}: {n}" for k, n in node.eager.items()), "dim"))
    if node.planned:
        parts.append(pair("captured", f"{node.captured}/{node.captured + node.planned}"))
    parts += underruns(node)
    mark = line((f"{view.glyphs.bottleneck} bottleneck", "hot")) if node.is_bottleneck else line()
    return fit(
        line(" ", (left(safe(node.name), 16), view.node_role(node.name)), " ") + take([*parts, mark], width - 19), width
    )


MOST_CORES: Final = 32
"""Most cores that are drawn one by one; of more, the busiest ones."""

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
        result = [_share("util", view.recent("gpus", rank.gpu, "util"), gpu.util)]
    else:
        result = [_share("busy", view.recent("ranks", key, "busy"), rank.busy)]
    nodes = view.nodes_of(rank.rank)
    if nodes:
        at, node = max(nodes, key=lambda pair: (pair[1].slots_total > 0, pair[1].busy))
        steps, rows = view.recent("nodes", at, "step_ms"), view.recent("nodes", at, "batch")
        result.append(Curve(title=f"{node.name} step", values=steps, now=node.step_ms, unit="ms"))
        result.append(Curve(title=f"{node.name} rows", values=rows, now=node.batch))
    if rank.pages_total:
        result.append(_share("pages", view.recent("ranks", key, "pages"), rank.pages_used / rank.pages_total))
    return result


def _share(title: str, values: Sequence[float | None], now: float | None) -> Curve:
    return Curve(title=title, values=values, now=now, unit="%", top=100.0, scale=100.0)


def charts(view: View, all_curves: Sequence[Curve], width: int, height: int, side_by_side: int) -> list[Line]:
    """Draw charts next to each other, at most `side_by_side`: `height` lines of `width` cells."""
    shown = all_curves[:side_by_side]
    if not shown:
        return []
    chart_width = (width - 2 - 2 * (len(shown) - 1)) // len(shown)
    rows = [line(" ")] * height
    for at, curve in enumerate(shown):
        drawn = chart(view, curve, chart_width, height)
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
    digits = 1 if curve.unit in ("x", "/s") else 0
    return f"{numbers.ms(value) if curve.unit == 'ms' else f'{value:.{digits}f}'} {curve.unit}".rstrip()


def time_axis(view: View, values: int, width: int) -> Line:
    """Draw `-5m00s` under the oldest value, `now` under the newest."""
    span = view.history.span_s
    ago = f"-{span // 60}m{span % 60:02d}s" if span >= 60 else f"-{span}s" if span else ""
    start = AXIS + max(0, width - AXIS - max(values, len(ago) + 4))
    return fit(line((left(" " * start + ago, width - 3), "faint"), ("now", "faint")), width)
