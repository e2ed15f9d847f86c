"""Ranks screen: one rank in full with memory, pages, nodes and curves of five minutes."""

from __future__ import annotations

from mstar_core.observe.frames import NodeStatus, RankStatus
from mstarctl.output.units import size_text
from mstarctl.top.data.view import NORMAL, TINY, View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import stacked
from mstarctl.top.drawing.line import Line, fit, left, line, safe, take, window
from mstarctl.top.layout.curves import charts, curves
from mstarctl.top.layout.ranks import folded, gpu_of, letters, load


def ranks_page(view: View, width: int, height: int, size: int, chosen: str | None) -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines, keys of the ranks in the first ones). The chosen rank is shown in full."""
    keys = sorted(view.store.ranks, key=lambda key: view.store.ranks[key].rank)
    if not keys:
        return window([line(), line(("  no rank has reported yet", "dim"))], height, width), []
    key = chosen if chosen in view.store.ranks else keys[0]
    room = max(2, min(len(keys), height // 3))
    at = keys.index(key)
    first = max(0, min(at - room + 1, len(keys) - room))
    shown = keys[first : first + room]
    rows = [row for one in shown for row in folded(view, [one], width, 1, size, chosen=key)]
    if size > TINY:
        named = [
            line((letter, view.node_role(name)), (f" {safe(name)}", "dim")) for name, letter in letters(view).items()
        ]
        rows.append(fit(line("   ") + take(named, width - 4, "  "), width))
        rows.append(line((view.glyphs.rule * width, "frame")))
    rows += rank_facts(view, view.store.ranks[key], width, size)
    room = height - len(rows) - 1
    if size > TINY and room >= 5:
        rows.append(line())
        rows += charts(view, curves(view, view.store.ranks[key]), width, min(room, 16), 3 if size >= NORMAL else 2)
    return window(rows, height, width), shown


def rank_facts(view: View, rank: RankStatus, width: int, size: int) -> list[Line]:
    """Draw all facts of a rank except its curves."""
    rows = [line(" ") + take(load(view, rank, 21 if size >= NORMAL else 10), width - 2)]
    child = next((c for c in view.store.children.values() if c.rank == rank.rank), None)
    gpu = gpu_of(view, rank)
    parts = [
        line(("pid ", "dim"), (str(rank.pid or numbers.NONE), "value")),
        line(("steps ", "dim"), (f"{numbers.rate(rank.steps_s)}/s", "value")),
        line(("requests ", "dim"), (str(rank.requests), "value")),
        line(("core ", "dim"), (numbers.percent(rank.core), "value")),
        line(("resident ", "dim"), (numbers.size(rank.resident_bytes), "value")),
        line(("shared memory ", "dim"), (numbers.size(rank.shm_bytes), "value")),
    ]
    if child is not None and child.restarts:
        parts.append(line(("restarts ", "dim"), (str(child.restarts), "warn")))
    if gpu is not None:
        parts += [
            line(("", "dim"), (f"{gpu.temperature_c:.0f} °C", "value")) if gpu.temperature_c is not None else line(),
            line((f"{gpu.clock_mhz:.0f} MHz", "value")) if gpu.clock_mhz is not None else line(),
            line(("limit ", "dim"), (f"{gpu.power_limit_w:.0f} W", "value")) if gpu.power_limit_w else line(),
        ]
    rows.append(line(" ") + take(parts, width - 2))
    if size == TINY:
        return rows
    rows += [line(), *memory(view, rank, width), *pages(view, rank, width), line()]
    rows += [node_facts(view, node, width) for _, node in view.nodes_of(rank.rank)]
    return rows


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
    """Draw the pages of the rank's caches: used, cached prefixes, free."""
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
    ]
    return [
        line((" pages  ", "dim")) + stacked(parts, room, view.glyphs.rest if view.glyphs.is_ascii else " "),
        line(" " * 8) + take(words, width - 9, "   "),
    ]


def node_facts(view: View, node: NodeStatus, width: int) -> Line:
    """Draw the step times of a node, and its steps without a CUDA graph by kind."""
    parts = [
        line(
            ("step p50 ", "dim"),
            (numbers.ms(node.step_p50_ms), "value"),
            (" p99 ", "dim"),
            (numbers.ms(node.step_p99_ms), "value"),
            (" ms", "dim"),
        ),
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
        parts.append(line(("eager: ", "dim"), (", ".join(f"{safe(k)}: {n}" for k, n in node.eager.items()), "dim")))
    if node.underruns is not None:
        parts.append(line(("underruns ", "dim"), (str(node.underruns), "bad" if node.underruns else "value")))
    mark = line((f"{view.glyphs.bottleneck} bottleneck", "hot")) if node.is_bottleneck else line()
    return fit(
        line(" ", (left(safe(node.name), 16), view.node_role(node.name)), " ") + take([*parts, mark], width - 19), width
    )
