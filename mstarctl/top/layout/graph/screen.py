"""Graph screen: the dataflow with live rates as a drawing, or as a list if it does not fit, and facts of one node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from msgspec.structs import replace

from mstar_core.observe.frames import GraphView, NodeStatus, NodeView
from mstarctl.output.line import Line, Span, cells, clip_inside, fit, join, left, line, pair, right, safe, take, window
from mstarctl.output.units import counted, size_text
from mstarctl.top.data.view import NORMAL, SMALL, View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import spark
from mstarctl.top.layout.canvas import Canvas
from mstarctl.top.layout.graph.geometry import IN, OUT, GraphLayout, Route, Size, Wire, graph_of, place, wires
from mstarctl.top.layout.ranks import HOST_CELLS, RULE, step_times, underruns

HEAVY_BYTES_S: Final = 10 * 2**20
"""Rate from which a wire is drawn thick."""

DOT_ITEMS_S: Final = 50
SMALL_NAME: Final = 12
"""Most cells of a name in a small box."""

DrawBox = Callable[[View, NodeView, str], list[Line]]


def graph_page(view: View, width: int, height: int, size: int, walk: str = "", chosen: str = "") -> list[Line]:
    """Draw exactly `height` lines: the highlighted walk, the dataflow, facts of the chosen node or the bottleneck."""
    graph = graph_of(view)
    if not graph.nodes:
        return window([line(), line(("  the graph is not known yet", "dim"))], height, width)
    shown = chosen or bottleneck(view) or graph.nodes[0].name
    facts = node_facts(view, graph, shown, width)
    top = [walk_line(view, graph, walk, width)]
    room = height - len(top) - len(facts) - 1
    body = drawing(view, graph, walk, shown if chosen else "", width, room) if size >= SMALL else None
    if body is None:
        body = listed(view, graph, walk, chosen, width)
    used = [line(), *body][: max(0, room)]
    spare = room - len(used)
    rows = node_table(view, graph, walk, width) if size >= NORMAL else []
    if rows and spare > len(rows):
        used += [line(), *rows]
        spare -= len(rows) + 1
    return window([*top, *used, *[line()] * spare, line(), *facts], height, width)


def bottleneck(view: View) -> str:
    """Return the bottleneck, if there is one."""
    return next((node.name for node in view.store.nodes.values() if node.is_bottleneck), "")


def walk_line(view: View, graph: GraphView, walk: str, width: int) -> Line:
    """Draw the highlighted walk and the legend."""
    inside = sum(node.walks.get(walk, 0) for node in view.store.nodes.values())
    text = (
        line((" walk: ", "dim"), (safe(walk), "accent"), (f" ({counted(inside, 'request')})", "dim"))
        if walk
        else line((f" {counted(len(graph.walks), 'walk')}, all shown", "dim"), ("   w: one at a time", "faint"))
    )
    dashed = "   dashed = between hosts" if view.hosts else ""
    key = line((f"{view.glyphs.dot} = {DOT_ITEMS_S} items/s   thick = 10 MiB/s and more{dashed} ", "faint"))
    return fit(text, width) if text.width + key.width + 2 > width else fit(text, width - key.width) + key


# -- boxes --------------------------------------------------------------------------------------------------------


def box(view: View, node: NodeView, chosen: str) -> list[Line]:
    """Draw the box of a node: name, rank, step time, load."""
    live = [(key, n) for key, n in view.store.nodes.items() if n.name == node.name]
    placed = {n.rank for _, n in live} or {group[0] for group in node.replicas if group}
    ranks = [rank_text(view, node.name, rank) for rank in sorted(placed)]
    batch = sum(n.batch for _, n in live)
    name = line((safe(node.name), view.node_role(node.name)))
    if node.name == chosen:
        name = Line((Span(safe(node.name), f"{view.node_role(node.name)}+selected"),))
    where = f"rank {','.join(ranks)}" if ranks else "not placed"
    ended = " ended" if placed and all(view.is_ended(rank) for rank in placed) else ""
    hosts = f" {hosts_text(view, placed)}" if view.hosts and placed else ""
    rows = [name, line((where, "dim"), (hosts, "dim"), (ended, "bad"), (f"  b{batch}" if batch else "", "value"))]
    steps = [n.step_ms for _, n in live if n.step_ms is not None]
    if steps:
        mark = f"{view.glyphs.loop} " if node.loops else ""
        slow = f" {view.glyphs.bottleneck}" if any(n.is_bottleneck for _, n in live) else ""
        rows.append(line((f"{mark}{numbers.ms(max(steps))} ms", "value"), (slow, "hot")))
    else:
        rows.append(line(("idle", "faint")))
    if live:
        key, busiest = max(live, key=lambda pair: pair[1].busy)
        curve = spark(view.recent("nodes", key, "busy"), 6, view.glyphs, peak=1.0)
        rows.append(line((curve, "spark"), (f" {numbers.percent(busiest.busy)}", "dim")))
    return rows


def small_box(view: View, node: NodeView, chosen: str) -> list[Line]:
    """Draw a box of two lines: the name, then the rank and the step time, or the end of its process."""
    name, where, step, *_ = box(view, node, chosen)
    rank = where.spans[0].text.replace("rank ", "r")
    time = step.plain.replace(view.glyphs.loop, "").replace(view.glyphs.bottleneck, "").strip()
    is_slow = step.plain.endswith(view.glyphs.bottleneck)
    state = ("ended", "bad") if " ended" in where.plain else (time, "hot" if is_slow else "value")
    below = line((f"{rank} ", "dim"), state)
    return [fit(name, min(name.width, SMALL_NAME)), below]


def hosts_text(view: View, ranks: Iterable[int]) -> str:
    """Return the host of some ranks, or the number of their hosts: `node-b`, `2 hosts`."""
    hosts = sorted({view.host_of(rank) for rank in ranks})
    return clip_inside(safe(hosts[0]), HOST_CELLS) if len(hosts) == 1 else counted(len(hosts), "host")


def is_remote(view: View, wire: Wire) -> bool:
    """Return whether a wire joins hosts: as measured, else if its ends have no host in common."""
    if wire.ranks:
        return any(view.host_of(source) != view.host_of(into) for source, into in wire.ranks)
    ends = [
        {view.host_of(n.rank) for n in view.store.nodes.values() if n.name == end} for end in (wire.source, wire.into)
    ]
    return bool(ends[0] and ends[1]) and not ends[0] & ends[1]


def rank_text(view: View, name: str, rank: int, *, is_short: bool = False) -> str:
    """Return the rank of a node, or the ranks of its tensor-parallel group: `0+1 TP2`, `0-7 TP8`. is_short: no TP."""
    group = view.group_of(name, rank)
    if len(group) == 1:
        return str(rank)
    is_run = len(group) > 2 and group == list(range(group[0], group[0] + len(group)))
    ranks = f"{group[0]}-{group[-1]}" if is_run else "+".join(map(str, group))
    return ranks if is_short else f"{ranks} TP{len(group)}"


def terminal(key: str) -> list[Line]:
    """Draw the box of a client input or output."""
    return [line((f"[{safe(key[1:])}]", "value"))]


# -- the drawing --------------------------------------------------------------------------------------------------


def drawing(view: View, graph: GraphView, walk: str, chosen: str, width: int, height: int) -> list[Line] | None:
    """Draw the graph centred, or the highlighted walk alone if the graph is too large; None if both are.

    Boxes of two lines are tried where those of four do not fit.
    """
    for part in (graph, _part(graph, walk)) if walk else (graph,):
        for draw_box in (box, small_box):
            rows = _fitted(view, part, walk, chosen, width, height, draw_box)
            if rows is not None:
                return rows
    return None


def _part(graph: GraphView, walk: str) -> GraphView:
    nodes = [node for node in graph.nodes if walk in node.walks]
    inside = {node.partition for node in nodes}
    return replace(
        graph,
        nodes=nodes,
        edges=[edge for edge in graph.edges if walk in edge.walks],
        partitions=[name for name in graph.partitions if name in inside],
    )


def _fitted(
    view: View, graph: GraphView, walk: str, chosen: str, width: int, height: int, draw_box: DrawBox
) -> list[Line] | None:
    routes = wires(graph, view.store.edges.values())
    boxes = {node.name: draw_box(view, node, chosen) for node in graph.nodes}
    boxes |= {end: terminal(end) for wire in routes for end in (wire.source, wire.into) if end[:1] in (IN, OUT)}
    sizes = {
        key: Size(width=max(row.width for row in rows), height=len(rows), port=rows[0].width)
        for key, rows in boxes.items()
    }
    for extra in (0, 16, 8, 4):  # without extra room first, because nothing else fits where that does not
        layout = place(graph, routes, sizes, extra)
        fits = layout.width <= width - 2 and layout.height <= height
        if not extra:
            if not fits:
                return None
            smallest = layout
        elif fits:
            return _draw(view, graph, layout, boxes, walk, width)
    return _draw(view, graph, smallest, boxes, walk, width)


def _draw(
    view: View, graph: GraphView, layout: GraphLayout, boxes: dict[str, list[Line]], walk: str, width: int
) -> list[Line]:
    shift = max(1, (width - layout.width) // 2)
    canvas = Canvas(width, layout.height + 1, view.glyphs)
    lit = {node.name for node in graph.nodes if not walk or walk in node.walks}
    for frame in layout.frames:
        canvas.frame(frame.x + shift, frame.y, frame.width, frame.height, "frame")
        canvas.put(frame.x + shift + 2, frame.y, f" {safe(frame.name)} "[: frame.width - 4], "dim")
    for route in layout.routes:
        role = _wire_role(route.wire, walk)
        heavy = (route.wire.bytes_s or 0) >= HEAVY_BYTES_S
        dashed = is_remote(view, route.wire)
        for start, end in zip(route.corners, route.corners[1:], strict=False):
            points = (start[0] + shift, start[1]), (end[0] + shift, end[1])
            canvas.wire(*points, role, is_heavy=heavy, is_dashed=dashed)
    canvas.ink()
    for route in layout.routes:
        _dots(view, canvas, route, shift, walk)
        x, y = route.corners[-1]
        canvas.put(x + shift, y, view.glyphs.arrow_right, _wire_role(route.wire, walk))
    for key, at in layout.boxes.items():
        is_lit = key in lit or key[:1] in (IN, OUT)
        for index, row in enumerate(boxes[key]):
            canvas.put_line(at.x + shift, at.y + index, row if is_lit else _off(row))
    _labels(view, canvas, layout, shift)
    return canvas.lines()


def _off(row: Line) -> Line:
    return Line(tuple(Span(text, f"{role.partition('+')[0]}+off") for text, role in row.spans))


def _wire_role(wire: Wire, walk: str) -> str:
    if walk and walk not in wire.walks:
        return "frame+off"
    return "flow" if wire.items_s else "dim"


def _dots(view: View, canvas: Canvas, route: Route, shift: int, walk: str) -> None:
    """Draw moving dots on the segment of a wire that it shares with no other."""
    if not route.wire.items_s or walk and walk not in route.wire.walks:
        return
    (x0, y), (x1, _) = route.corners[route.shown], route.corners[route.shown + 1]
    length = x1 - x0
    if length < 2:
        return
    count = min(max(1, round(route.wire.items_s / DOT_ITEMS_S)), max(1, length // 3))
    for dot in range(count):
        at = (dot * length // count + view.phase) % length
        canvas.put(x0 + at + shift, y, view.glyphs.dot, "flow")


def _labels(view: View, canvas: Canvas, layout: GraphLayout, shift: int) -> None:
    """Draw rates above streams and chunk policies under the frames that they feed, if there is room."""
    for route in layout.routes:
        (x0, y), (x1, _) = route.corners[route.shown], route.corners[route.shown + 1]
        text = f"{numbers.rate(route.wire.items_s)}/s" if route.wire.items_s is not None else ""
        for x in range(x1 - len(text), x0, -1):
            if text and canvas.is_blank(x + shift - 1, y - 1, len(text) + 2):
                canvas.put(x + shift, y - 1, text, "value")
                break
    frames = sorted(layout.frames, key=lambda frame: frame.x)
    for route in layout.routes:
        at = layout.boxes.get(route.wire.into)
        if not route.wire.chunk or at is None:
            continue
        frame = next((f for f in frames if f.x < at.x < f.x + f.width and f.y <= at.y < f.y + f.height), None)
        text = f"chunk {safe(route.wire.chunk)}"
        if frame is not None and canvas.is_blank(frame.x + shift, frame.y + frame.height, min(len(text), frame.width)):
            canvas.put(frame.x + shift, frame.y + frame.height, left(text, frame.width).rstrip(), "faint")


# -- the list -----------------------------------------------------------------------------------------------------


def listed(view: View, graph: GraphView, walk: str, chosen: str, width: int) -> list[Line]:
    """Draw partitions and nodes as lines with their inputs, for narrow screens and wide graphs."""
    routes = wires(graph, view.store.edges.values())
    names = max((cells(node.name) for node in graph.nodes), default=4) + 1
    rows: list[Line] = []
    partitions = list(dict.fromkeys([*graph.partitions, *(node.partition for node in graph.nodes)]))
    for partition in partitions:
        inside = [node for node in graph.nodes if node.partition == partition]
        if not inside:
            continue
        title = f" {safe(partition)} "
        rows.append(
            line(
                (view.glyphs.frame[4] * 2 + title, "dim"),
                (view.glyphs.frame[4] * max(0, min(width, 78) - 2 - cells(title)), "frame"),
            )
        )
        for node in inside:
            rows.append(_listed(view, node, routes, walk, chosen, width, names))
    return rows


def _listed(view: View, node: NodeView, routes: list[Wire], walk: str, chosen: str, width: int, names: int) -> Line:
    rows = box(view, node, chosen if node.name == chosen else "")
    facts = [fit(rows[0], min(names, width - 2))]
    facts += rows[1:2] if width < 60 else rows[1:]
    into = [wire for wire in routes if wire.into == node.name]
    fed = [
        line(
            (f"{view.glyphs.dashed[RULE] * 2} " if is_remote(view, wire) else "", "flow"),
            (safe(wire.source.lstrip(IN)), view.node_role(wire.source)),
            (f" {numbers.rate(wire.items_s)}/s" if wire.items_s is not None else "", "value"),
        )
        for wire in into
    ]
    row = line("  ") + take(
        [*facts, line((f"{view.glyphs.arrow_left} ", "dim")) + join(fed) if fed else line()], width - 2
    )
    return fit(_off(row) if walk and walk not in node.walks else row, width)


def node_table(view: View, graph: GraphView, walk: str, width: int) -> list[Line]:
    """Draw a table with a row for each node on each rank."""
    titles = "NODE,RANK,BATCH,STEP p50,p99 ms,STEPS/s,ROWS/s,TOK/s,QUEUE,SLOTS,PAGES,GRAPHS,BUSY".split(",")
    host = min(HOST_CELLS, max(map(len, view.hosts), default=0))
    titles[1] = "HOST RANK" if host else "RANK"
    sizes = (16, max(6, host + 5) if host else 6, 5, 8, 7, 8, 8, 7, 5, 7, 10, 7, 5)
    rows = [
        line(
            " ",
            (left(titles[0], sizes[0]), "head"),
            *((right(title, size + 1), "head") for title, size in zip(titles[1:], sizes[1:], strict=True)),
        )
    ]
    order = {node.name: place_ for place_, node in enumerate(graph.nodes)}
    for node in sorted(view.store.nodes.values(), key=lambda n: (order.get(n.name, 99), n.rank)):
        waiting = node.queue + node.waiting
        where = f"{hosts_text(view, [node.rank])} " if host else ""
        texts = (
            where + rank_text(view, node.name, node.rank, is_short=True),
            numbers.count(node.batch),
            numbers.ms(node.step_p50_ms),
            numbers.ms(node.step_p99_ms),
            numbers.rate(node.steps_s),
            numbers.rate(node.rows_s),
            numbers.rate(node.tokens_s),
            numbers.count(waiting),
            f"{node.slots_used}/{node.slots_total}" if node.slots_total else numbers.NONE,
            f"{node.pages_used}/{node.pages_total}" if node.pages_total else numbers.NONE,
            numbers.NONE if node.graph_share is None else f"{100 * node.graph_share:.1f} %",
            numbers.percent(node.busy),
        )
        row = line(
            " ",
            (left(safe(node.name), sizes[0]), view.node_role(node.name)),
            *(
                (right(text, size + 1), "dim" if text == numbers.NONE else "value")
                for text, size in zip(texts, sizes[1:], strict=True)
            ),
        )
        spec = next((n for n in graph.nodes if n.name == node.name), None)
        rows.append(fit(_off(row) if walk and spec and walk not in spec.walks else row, width))
    return rows


# -- facts --------------------------------------------------------------------------------------------------------


def node_facts(view: View, graph: GraphView, name: str, width: int) -> list[Line]:
    """Draw up to four lines about a node: walks, pages, step times, CUDA graphs, incoming wires."""
    live = [node for node in view.store.nodes.values() if node.name == name]
    spec = next((node for node in graph.nodes if node.name == name), None)
    if spec is None and not live:
        return []
    walks = ", ".join(spec.walks if spec else live[0].walks)
    rows = [fit(line(" ", (safe(name), view.node_role(name)), ("   walks ", "dim"), safe(walks)), width)]
    for node in live:
        where = rank_text(view, node.name, node.rank)
        where += f" on {hosts_text(view, view.group_of(node.name, node.rank))}" if view.hosts else ""
        shown_at = where if len(live) > 1 or "TP" in where or view.hosts else ""
        rows.append(fit(line(" ") + take(_facts_of(node, shown_at), width - 2, "   "), width))
    into = [wire for wire in wires(graph, view.store.edges.values()) if wire.into == name and wire.items_s is not None]
    if into and width >= 100:
        fed = [
            line(
                (f"{view.glyphs.arrow_left} ", "dim"),
                (safe(wire.source.lstrip(IN)), view.node_role(wire.source)),
                (f" {safe(', '.join(wire.names))}", "dim"),
                (f"  {numbers.rate(wire.items_s)}/s", "value"),
                (f"  {size_text(wire.bytes_s or 0)}/s", "dim"),
            )
            for wire in into
        ]
        rows.append(fit(line(" ") + take(fed, width - 2, "   "), width))
    return rows[:4]


def _facts_of(node: NodeStatus, where: str) -> list[Line]:
    parts = [line((f"rank {where}", "value"))] if where else []
    if node.pages_total:
        cached = f", {node.pages_cached} cached" if node.pages_cached else ""
        cached += f", {node.pages_leased} leased" if node.pages_leased else ""
        parts.append(pair("pages", f"{node.pages_used}/{node.pages_total}") + line((cached, "dim")))
    if node.slots_total:
        parts.append(pair("slots", f"{node.slots_used}/{node.slots_total}"))
    if node.step_p50_ms is not None:
        parts.append(step_times(node))
    if node.planned:
        parts.append(pair("captured", f"{node.captured}/{node.captured + node.planned}"))
    if node.graph_share is not None:
        why = ", ".join(f"{safe(reason)}: {n}" for reason, n in sorted(node.eager.items(), key=lambda p: -p[1])[:2])
        parts.append(
            line(
                ("eager ", "dim"),
                (f"{100 * (1 - node.graph_share):.1f} %", "value"),
                (f" ({why})" if why else "", "dim"),
            )
        )
    if node.tokens_s:
        parts.append(line((numbers.rate(node.tokens_s), "value"), (" tok/s", "dim")))
    parts += underruns(node)
    if node.is_bottleneck:
        parts.append(line(("bottleneck", "hot")))
    return parts
