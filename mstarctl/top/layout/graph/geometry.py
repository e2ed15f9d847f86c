"""Wires of the graph drawing, and its geometry: columns by level, rows by neighbours, tracks. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.observe.frames import EdgeStatus, EdgeView, GraphView, NodeStatus, NodeView
from mstarctl.top.data.view import View

IN: Final = "<"
OUT: Final = ">"
"""First character of the keys of terminals, which stand for the client's inputs and outputs: `<audio`, `>text`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """All edges from one box to another. items_s, bytes_s: None if not measured. ranks: measured (from, to)."""

    source: str
    into: str
    names: tuple[str, ...]
    walks: frozenset[str]
    is_stream: bool = False
    chunk: str = ""
    items_s: float | None = None
    bytes_s: float | None = None
    ranks: frozenset[tuple[int, int]] = frozenset()


def graph_of(view: View) -> GraphView:
    """Return the graph of the deployment; until it is known, one made from the active nodes and edges."""
    if view.store.graph.nodes:
        return view.store.graph
    by_name: dict[str, list[NodeStatus]] = {}
    for node in view.store.nodes.values():
        by_name.setdefault(node.name, []).append(node)
    nodes = [
        NodeView(name=name, partition=replicas[0].partition, replicas=[[node.rank] for node in replicas])
        for name, replicas in sorted(by_name.items())
    ]
    known = {(edge.name, edge.source, edge.into): edge for edge in view.store.edges.values()}
    edges = [EdgeView(name=e.name, source=e.source, into=e.into, is_stream=e.is_stream) for e in known.values()]
    partitions = list(dict.fromkeys(node.partition for node in nodes))
    return GraphView(model=view.store.deployment.model, nodes=nodes, edges=edges, partitions=partitions)


def wires(graph: GraphView, live: Iterable[EdgeStatus]) -> list[Wire]:
    """Group the edges between two boxes into one wire. Self-loops are left out: the box shows them."""
    rates: dict[tuple[str, str, str], Measured] = {}
    for edge in live:
        ends_of = (edge.name, edge.source, edge.into)
        items, size, ranks = rates.get(ends_of, (0.0, 0.0, frozenset()))
        pair = (edge.source_rank, edge.into_rank)
        rates[ends_of] = (items + edge.items_s, size + edge.bytes_s, ranks | {pair})
    names = {node.name for node in graph.nodes}
    grouped: dict[tuple[str, str], list[EdgeView]] = {}
    for route in graph.edges:
        source = route.source or f"{IN}{route.modality or route.name}"
        into = route.into or f"{OUT}{route.modality or route.name}"
        if source == into or any(end not in names and end[:1] not in (IN, OUT) for end in (source, into)):
            continue
        grouped.setdefault((source, into), []).append(route)
    return [_wire(ends, edges, rates) for ends, edges in grouped.items()]


Measured = tuple[float, float, frozenset[tuple[int, int]]]
"""Items and bytes per second of an edge over all pairs of ranks, and these pairs."""


def _wire(ends: tuple[str, str], edges: Sequence[EdgeView], rates: Mapping[tuple[str, str, str], Measured]) -> Wire:
    measured = [rate for edge in edges if (rate := rates.get((edge.name, edge.source, edge.into))) is not None]
    return Wire(
        source=ends[0],
        into=ends[1],
        names=tuple(dict.fromkeys(edge.name for edge in edges)),
        walks=frozenset(walk for edge in edges for walk in edge.walks),
        is_stream=any(edge.is_stream for edge in edges),
        chunk=next((edge.chunk for edge in edges if edge.chunk), ""),
        items_s=sum(items for items, _, _ in measured) if measured else None,
        bytes_s=sum(size for _, size, _ in measured) if measured else None,
        ranks=frozenset(pair for _, _, pairs in measured for pair in pairs),
    )


def acyclic(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs without those that would close a cycle with earlier ones."""
    after: dict[str, set[str]] = {name: set() for name in names}
    kept = []
    for source, into in pairs:
        if source == into or source not in after or into not in after or _reaches(after, into, source):
            continue
        after[source].add(into)
        kept.append((source, into))
    return kept


def _reaches(after: Mapping[str, set[str]], start: str, goal: str) -> bool:
    seen, todo = {start}, [start]
    while todo:
        here = todo.pop()
        if here == goal:
            return True
        fresh = after[here] - seen
        seen |= fresh
        todo += fresh
    return False


def levels(names: Sequence[str], pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return the length of the longest path to each name, without pairs that close a cycle."""
    kept = acyclic(names, pairs)
    level = dict.fromkeys(names, 0)
    for _ in names:
        for source, into in kept:
            level[into] = max(level[into], level[source] + 1)
    return level


Point = tuple[int, int]
"""(x, y) in cells, from the upper left."""

ARROW: Final = 3
"""Cells before a box: rule, arrow head, blank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Cells of a box. port: width of its first line, after which wires start."""

    width: int
    height: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a box; (x, y) is its first cell."""

    x: int
    y: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The rectangle around a partition, corners included."""

    name: str
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A wire as corners from its source to the arrow head. shown: first corner of the segment for its dots."""

    wire: Wire
    corners: tuple[Point, ...]
    shown: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLayout:
    """The positions of all boxes, frames and routes."""

    width: int
    height: int
    boxes: Mapping[str, Place]
    frames: Sequence[Frame]
    routes: Sequence[Route]


@dataclass(slots=True)
class Placement:
    """Working state of `place`."""

    graph: GraphView
    wires: Sequence[Wire]
    sizes: Mapping[str, Size]
    extra: int
    partition: dict[str, str] = field(default_factory=dict)
    column: dict[str, int] = field(default_factory=dict)
    bands: list[tuple[int, int]] = field(default_factory=list)
    band_of: dict[str, int] = field(default_factory=dict)
    y: dict[str, int] = field(default_factory=dict)
    frames: dict[str, tuple[int, int]] = field(default_factory=dict)
    through: dict[int, list[str]] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    x: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    tracks: dict[tuple[int, str], int] = field(default_factory=dict)
    track_count: dict[int, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Column of the terminals at the right."""
        return (self.bands[-1][1] if self.bands else 0) + 1


def place(graph: GraphView, wires: Sequence[Wire], sizes: Mapping[str, Size], extra: int = 0) -> GraphLayout:
    """Place all nodes and terminals with a size. extra: cells between partitions, for the rates of streams."""
    plan = Placement(graph, wires, sizes, extra)
    _columns(plan)
    _paths(plan)
    _rows(plan)
    _lanes(plan)
    _terminals(plan)
    _tracks(plan)
    _across(plan)
    return _drawing(plan)


# -- columns ------------------------------------------------------------------------------------------------------


def _columns(plan: Placement) -> None:
    graph = plan.graph
    plan.partition = {node.name: node.partition for node in graph.nodes}
    partitions = list(
        dict.fromkeys([*(p for p in graph.partitions if p in plan.partition.values()), *plan.partition.values()])
    )
    pairs = [(w.source, w.into) for w in plan.wires if w.source in plan.partition and w.into in plan.partition]
    level = levels(partitions, [(plan.partition[a], plan.partition[b]) for a, b in pairs])
    start = 1
    for band in range(max(level.values(), default=-1) + 1):
        depth = 1
        for name in (p for p in partitions if level[p] == band):
            plan.band_of[name] = band
            inside = [node.name for node in graph.nodes if node.partition == name]
            order = levels(inside, [(a, b) for a, b in pairs if a in inside and b in inside])
            plan.column.update({node: start + order[node] for node in inside})
            depth = max(depth, max(order.values(), default=0) + 1)
        plan.bands.append((start, start + depth - 1))
        start += depth
    for wire in plan.wires:
        if wire.source.startswith(IN):
            plan.column[wire.source] = 0
        if wire.into.startswith(OUT):
            plan.column[wire.into] = plan.last


def _paths(plan: Placement) -> None:
    """Split wires into those that pass between nodes of their own partitions, with a key per column, and lanes."""
    for index, wire in enumerate(plan.wires):
        first, last = plan.column[wire.source], plan.column[wire.into]
        own_bands = {plan.band_of[plan.partition[end]] for end in (wire.source, wire.into) if end in plan.partition}
        between = range(first + 1, last)
        if last <= first or any(_band(plan, column) not in own_bands for column in between):
            plan.lanes[index] = 0
        else:
            plan.through[index] = [f"{index}|{column}" for column in between]
            plan.column.update({key: column for key, column in zip(plan.through[index], between, strict=True)})


def _band(plan: Placement, column: int) -> int:
    return next((i for i, (first, last) in enumerate(plan.bands) if first <= column <= last), -1)


# -- rows ---------------------------------------------------------------------------------------------------------


def _rows(plan: Placement) -> None:
    home: dict[str, str] = dict(plan.partition)
    for index, keys in plan.through.items():
        ends = [end for end in (plan.wires[index].source, plan.wires[index].into) if end in plan.partition]
        for key in keys:
            band = _band(plan, plan.column[key])
            home[key] = next(plan.partition[end] for end in ends if plan.band_of[plan.partition[end]] == band)
    before = _before(plan)
    for band, (first, last) in enumerate(plan.bands):
        top = 0
        for name in (p for p, of in plan.band_of.items() if of == band):
            bottom = top + 1
            for column in range(first, last + 1):
                inside = [key for key in home if home[key] == name and plan.column[key] == column]
                bottom = max(bottom, _stack(plan, inside, before, top + 1))
            plan.frames[name] = (top, bottom + 1)
            top = bottom + 3


def _before(plan: Placement) -> dict[str, list[str]]:
    """Return the predecessors of each box and passage, without terminals."""
    sources: dict[str, list[str]] = {}
    for index, keys in plan.through.items():
        wire = plan.wires[index]
        way = [wire.source, *keys, wire.into]
        for source, into in itertools.pairwise(way):
            if not source.startswith(IN):
                sources.setdefault(into, []).append(source)
    return sources


def _stack(plan: Placement, keys: Sequence[str], before: Mapping[str, list[str]], top: int) -> int:
    """Place a column of a partition from row `top`, each box near its predecessors. Returns the last row."""
    wish = {}
    for place_, key in enumerate(keys):
        rows = [plan.y[other] for other in before.get(key, ()) if other in plan.y]
        wish[key] = (sum(rows) / len(rows) if rows else (1000.0 if "|" in key else -1.0), place_)
    free = bottom = top
    for key in sorted(keys, key=lambda key: wish[key]):
        want = int(wish[key][0]) if 0 <= wish[key][0] < 1000 else free
        plan.y[key] = max(free, want)
        height = plan.sizes[key].height if key in plan.sizes else 1
        bottom = plan.y[key] + height - 1
        free = bottom + 2
    return bottom


def _lanes(plan: Placement) -> None:
    """Assign rows below all frames to lanes. Lanes that do not overlap share a row."""
    bottom = max((until for _, until in plan.frames.values()), default=0)
    taken: list[list[tuple[int, int]]] = []
    for index in plan.lanes:
        wire = plan.wires[index]
        span = sorted((plan.column[wire.source], plan.column[wire.into]))
        low, high = span[0], span[1]
        lane = next((n for n, spans in enumerate(taken) if all(high <= a or low >= b for a, b in spans)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        plan.lanes[index] = bottom + 2 + 2 * lane


def _terminals(plan: Placement) -> None:
    """Place terminals in the row of the box that they feed, or of their lane."""
    for column, is_source in ((0, True), (plan.last, False)):
        wish: dict[str, list[int]] = {}
        for index, wire in enumerate(plan.wires):
            key, other = (wire.source, wire.into) if is_source else (wire.into, wire.source)
            if plan.column.get(key) != column or not key.startswith((IN, OUT)):
                continue
            way = [wire.source, *plan.through.get(index, []), wire.into]
            near = way[1] if is_source else way[-2]
            wish.setdefault(key, []).append(plan.lanes.get(index) or plan.y.get(near, plan.y.get(other, 1)))
        free = 0
        for key in sorted(wish, key=lambda key: (min(wish[key]), key)):
            plan.y[key] = max(free, min(wish[key]))
            free = plan.y[key] + 2


# -- gaps ---------------------------------------------------------------------------------------------------------


def _segments(plan: Placement) -> list[tuple[int, int, int, str, int]]:
    """Return the segments of all wires: (gap, left row, right row, group, wire). A group shares one track in a gap."""
    into_count: dict[str, int] = {}
    for wire in plan.wires:
        into_count[wire.into] = into_count.get(wire.into, 0) + 1
    segments = []
    for index, wire in enumerate(plan.wires):
        if index in plan.lanes:
            lane = plan.lanes[index]
            segments.append((plan.column[wire.source], plan.y[wire.source], lane, f"s{wire.source}|{index}", index))
            segments.append((plan.column[wire.into] - 1, lane, plan.y[wire.into], f"t{wire.into}|{index}", index))
            continue
        way = [wire.source, *plan.through[index], wire.into]
        for source, into in itertools.pairwise(way):
            is_end = into == wire.into
            group = f"t{into}" if is_end and into_count[into] > 1 else f"s{source}"
            segments.append((plan.column[source], plan.y[source], plan.y[into], group, index))
    return segments


def _tracks(plan: Placement) -> None:
    spans: dict[tuple[int, str], tuple[int, int]] = {}
    for gap, start, end, group, _ in _segments(plan):
        if start == end:
            continue
        low, high = spans.get((gap, group), (start, start))
        spans[gap, group] = (min(low, start, end), max(high, start, end))
    for gap, group in sorted(spans, key=lambda key: (key[0], spans[key][1] - spans[key][0], spans[key])):
        low, high = spans[gap, group]
        used = {
            track
            for (other_gap, other), track in plan.tracks.items()
            if other_gap == gap and not (high < spans[other_gap, other][0] or low > spans[other_gap, other][1])
        }
        track = next(n for n in range(len(used) + 1) if n not in used)
        plan.tracks[gap, group] = track
        plan.track_count[gap] = max(plan.track_count.get(gap, 0), track + 1)


def _across(plan: Placement) -> None:
    """Set the first cell of each column. A gap at the edge of a band has room for the sides of frames."""
    widths = [0] * (plan.last + 1)
    for key, size in plan.sizes.items():
        if key in plan.column:
            widths[plan.column[key]] = max(widths[plan.column[key]], size.width)
    starts = {first for first, _ in plan.bands}
    ends = {last for _, last in plan.bands}
    x = 0
    for column, width in enumerate(widths):
        plan.x.append(x)
        inner = (2 if plan.track_count.get(column) else 1) + 2 * plan.track_count.get(column, 0)
        is_edge = column in ends or column + 1 in starts
        gap = inner + ARROW + (2 if column in ends else 0) + (1 if column + 1 in starts else 0)
        if column in ends and column + 1 in starts:
            gap += plan.extra
        elif is_edge:
            gap += 1
        x += width + gap
    plan.widths = widths


def _track_x(plan: Placement, gap: int, group: str) -> int:
    """Return the x coordinate of a track in a gap."""
    ends = {last for _, last in plan.bands}
    left = plan.x[gap] + plan.widths[gap] + (2 if gap in ends else 0) + 2
    return left + 2 * plan.tracks[gap, group]


# -- the drawing --------------------------------------------------------------------------------------------------


def _drawing(plan: Placement) -> GraphLayout:
    boxes = {
        key: Place(x=plan.x[plan.column[key]], y=plan.y[key], column=plan.column[key])
        for key in plan.sizes
        if key in plan.column
    }
    frames = []
    for name, (top, bottom) in plan.frames.items():
        first, last = plan.bands[plan.band_of[name]]
        x = plan.x[first] - ARROW - 1
        frames.append(
            Frame(name=name, x=x, y=top, width=plan.x[last] + plan.widths[last] + 2 - x, height=bottom - top + 1)
        )
    routes = [_route(plan, index) for index in range(len(plan.wires))]
    width = plan.x[plan.last] + plan.widths[plan.last]
    rows = [frame.y + frame.height for frame in frames] + [
        place_.y + plan.sizes[key].height for key, place_ in boxes.items()
    ]
    rows += [y + 1 for route in routes for _, y in route.corners]
    return GraphLayout(width=width, height=max(rows, default=0), boxes=boxes, frames=frames, routes=routes)


def _route(plan: Placement, index: int) -> Route:
    wire = plan.wires[index]
    x = plan.x[plan.column[wire.source]] + plan.sizes[wire.source].port + 1
    corners: list[Point] = [(x, plan.y[wire.source])]
    for gap, start, end, group, of in _segments(plan):
        if of == index and start != end:
            track = _track_x(plan, gap, group)
            corners += [(track, start), (track, end)]
    corners.append((plan.x[plan.column[wire.into]] - 2, plan.y[wire.into]))
    is_merging = any(of == index and group.startswith("t") for _, _, _, group, of in _segments(plan))
    return Route(wire=wire, corners=tuple(corners), shown=0 if is_merging or len(corners) == 2 else len(corners) - 2)
