"""Blocks of ranks: frames with device load and nodes, edges between them; one line each if space is short."""

from __future__ import annotations

from typing import Final

from mstar_core.observe.frames import EdgeStatus, GpuStatus, NodeStatus, RankStatus
from mstarctl.output.units import size_text
from mstarctl.top.data.view import NORMAL, TINY, View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import bar, spark
from mstarctl.top.drawing.line import EMPTY, Line, clip, fit, join, left, line, safe, take

LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def blocks(view: View, width: int, height: int, size: int, chosen: str | None = None) -> list[Line]:
    """Draw all ranks in at most `height` lines: framed, else one line each, else with `6 more ranks`."""
    keys = sorted(view.store.ranks, key=lambda key: view.store.ranks[key].rank)
    if size >= NORMAL:
        framed = _framed(view, keys, width, chosen)
        if len(framed) <= height:
            return framed
    return folded(view, keys, width, height, size, chosen)


def _framed(view: View, keys: list[str], width: int, chosen: str | None) -> list[Line]:
    rows: list[Line] = []
    for index, key in enumerate(keys):
        if index:
            rows += between(view, width)[index - 1 : index]
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
    return rows


def gpu_of(view: View, rank: RankStatus) -> GpuStatus | None:
    """Return the GPU of a rank."""
    return view.store.gpus.get(rank.gpu) if rank.gpu is not None else None


def load(view: View, rank: RankStatus, bar_width: int) -> list[Line]:
    """Return the parts of a frame's title, most important first: rank, device, utilisation, memory, pages, power."""
    gpu = gpu_of(view, rank)
    device = f"gpu{gpu.index} {short_gpu(gpu.name)}" if gpu is not None else rank.device
    share, word = (gpu.util, "util") if gpu is not None and gpu.util is not None else (rank.busy, "busy")
    used, total = (rank.memory_used or rank.resident_bytes, rank.memory_total)
    if gpu is not None and gpu.memory_used is not None:
        used, total = gpu.memory_used, gpu.memory_total
    parts = [
        line((f"rank {rank.rank}", "strong")),
        line((safe(device), "dim")),
        line((f"{word} ", "dim"), bar(share, bar_width, view.glyphs), (f" {numbers.percent(share):>5}", _hot(share))),
        line(("mem ", "dim"), (numbers.amount(used, total), "value")),
    ]
    if rank.pages_total:
        full = rank.pages_used / rank.pages_total
        parts.append(line(("pages ", "dim"), (f"{rank.pages_used}/{rank.pages_total}", _hot(full))))
    if gpu is not None and gpu.power_w is not None:
        parts.append(line((f"{gpu.power_w:.0f} W", "dim")))
    if rank.core is not None and gpu is None:
        parts.append(line(("core ", "dim"), (numbers.percent(rank.core), "value")))
    if rank.state not in ("ready", ""):
        parts.insert(1, line((rank.state, "warn")))
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
        facts.append(line(("graphs ", "dim"), (f"{100 * node.graph_share:.1f} %", "value")))
    if node.slots_total or node.queue or node.waiting:
        waiting = node.queue + node.waiting
        trail = spark(view.recent("nodes", key, "queue")[-4:], 4, view.glyphs) if waiting else ""
        facts.append(line(("queue ", "dim"), (str(waiting), "warn" if waiting else "value"), (f" {trail}", "spark")))
    return facts + _playback(node)


def _busiest(walks: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(((walk, n) for walk, n in walks.items() if n), key=lambda pair: (-pair[1], pair[0]))[:2]


def _playback(node: NodeStatus) -> list[Line]:
    found = []
    if node.ahead_s is not None:
        role = "warn" if node.ahead_s < 0.1 else "value"
        found.append(line(("least ahead ", "dim"), (f"{node.ahead_s:.2f} s", role)))
    if node.underruns is not None:
        found.append(line(("underruns ", "dim"), (str(node.underruns), "bad" if node.underruns else "value")))
    return found


# -- edges --------------------------------------------------------------------------------------------------------


def between(view: View, width: int) -> list[Line]:
    """Draw the edges that cross ranks, two in a line; animated by the view's phase."""
    crossing = [edge for edge in view.store.edges.values() if edge.source_rank != edge.into_rank]
    crossing.sort(key=lambda edge: (edge.source_rank, edge.into_rank, edge.name))
    gaps = max(0, len(view.store.ranks) - 1)
    rows: list[Line] = []
    for gap in range(gaps):
        here = [
            edge
            for edge in crossing
            if min(edge.source_rank, edge.into_rank) <= gap < max(edge.source_rank, edge.into_rank)
            and (min(edge.source_rank, edge.into_rank) == gap)
        ]
        each = (width - 4) // max(1, min(2, len(here)))
        rows.append(fit(line("  ") + join((edge_line(view, edge, each - 2) for edge in here[:2]), "  "), width))
    return rows


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
    into = line(" ", (safe(edge.into), view.node_role(edge.into)))
    text = take(facts, max(0, width - into.width - names.width - 10))
    room = max(3, min(24, width - text.width - into.width - names.width - 2))
    return fit(text + line("  ") + names + flow(view, edge.items_s, room) + into, width)


def flow(view: View, items_s: float, width: int) -> Line:
    """Draw an arrow of `width` cells with one moving dot per 50 items per second."""
    dots = 0 if items_s <= 0 else min(max(1, round(items_s / 50)), max(1, (width - 1) // 3))
    cells = [view.glyphs.rule] * (width - 1)
    for dot in range(dots):
        cells[(dot * (width - 1) // dots + view.phase) % (width - 1)] = view.glyphs.dot
    return line(("".join(cells) + view.glyphs.arrow_right, "flow" if dots else "frame"))


# -- folded -------------------------------------------------------------------------------------------------------


def letters(view: View) -> dict[str, str]:
    """Return a letter for each node: the first free one of its name, else of the alphabet."""
    names = [node.name for node in view.store.graph.nodes] or sorted({n.name for n in view.store.nodes.values()})
    taken: dict[str, str] = {}
    for name in names:
        wanted = [c for c in name.upper() if c in LETTERS] + list(LETTERS)
        taken[name] = next((c for c in wanted if c not in taken.values()), "?")
    return taken


def folded(view: View, keys: list[str], width: int, height: int, size: int, chosen: str | None = None) -> list[Line]:
    """Draw one line per rank, with a legend of the nodes' letters if there is room."""
    has_legend = size > TINY and height > len(keys)
    room = height - (1 if has_legend else 0)
    shown = keys if len(keys) <= room else keys[: max(1, room - 1)]
    rows = [_folded(view, view.store.ranks[key], width, size, is_chosen=key == chosen) for key in shown]
    if len(shown) < len(keys):
        rows.append(fit(line((f" {len(keys) - len(shown)} more ranks", "dim")), width))
    if has_legend and view.store.nodes:
        named = [
            line((letter, view.node_role(name)), (f" {safe(name)}", "dim")) for name, letter in letters(view).items()
        ]
        rows.append(fit(line("   ") + take(named, width - 4), width))
    return rows[:height]


def _folded(view: View, rank: RankStatus, width: int, size: int, *, is_chosen: bool) -> Line:
    gpu = gpu_of(view, rank)
    share = gpu.util if gpu is not None and gpu.util is not None else rank.busy
    pages = numbers.part(rank.pages_used, rank.pages_total)
    number = line((f"{view.glyphs.cursor if is_chosen else ' '}{rank.rank} ", "strong"))
    if size == TINY:
        text = f" {numbers.percent(share):>5}"
        tail = "" if pages is None else f" p{100 * pages:.0f}"
        room = max(4, width // 3 - 2)
        return fit(number + bar(share, room, view.glyphs) + line((text, _hot(share)), (tail, "dim")), width)
    device = f"gpu{gpu.index}" if gpu is not None else clip(rank.device, 6)
    used, total = (gpu.memory_used, gpu.memory_total) if gpu else (rank.memory_used, rank.memory_total)
    memory = numbers.part(used, total)
    start = number + line(
        (f"{device:<6} ", "dim"), bar(share, 14, view.glyphs), (f" {numbers.percent(share):>5}", _hot(share))
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
    if not view.nodes_of(rank.rank):
        facts.append(start_line(view, rank, width - start.width - 24))
    return fit(start + line("  ") + take(facts, width - start.width - 2), width)
