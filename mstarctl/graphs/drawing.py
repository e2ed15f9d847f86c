"""Text drawing of a model's graph for the terminal: framed partitions, walks in layers, loops, streams and outputs.

Every character is one column wide. ascii_only replaces each by one ASCII character, so both drawings have one shape.
"""

from __future__ import annotations

import textwrap
from typing import Final

from mstar_core.graph.check.graph_check import run_input
from mstar_core.graph.compile.compiled import CompiledLoop, CompiledTask, CompiledWalk, Outlet
from mstar_core.graph.declare.streams import Stream
from mstar_core.graph.declare.walks import StopOn
from mstarctl.graphs.graph import Graph, policy_text

LEAST_WIDTH: Final = 40
_ASCII: Final = str.maketrans("─│┐┘┌└┬┴├┤┼▶▼↻≋═║╔╗╚╝…→", "-|+++++++++>v@~=|++++~>")
_JOINTS: Final = {  # (left, right, up, down)
    (1, 1, 0, 0): "─",
    (1, 1, 0, 1): "┬",
    (1, 1, 1, 0): "┴",
    (1, 1, 1, 1): "┼",
    (1, 0, 0, 1): "┐",
    (1, 0, 1, 0): "┘",
    (1, 0, 1, 1): "┤",
    (0, 1, 0, 1): "┌",
    (0, 1, 1, 0): "└",
    (0, 1, 1, 1): "├",
    (0, 0, 1, 1): "│",
    (1, 0, 0, 0): "─",
    (0, 1, 0, 0): "─",
}


def draw_graph(graph: Graph, width: int = 100, ascii_only: bool = False) -> str:
    """Return the drawing of the whole graph. No line is longer than `width` columns (at least 40)."""
    width = max(width, LEAST_WIDTH)
    lines = [_clip(graph.name, width), ""]
    names = list(graph.partitions)
    for number, partition in enumerate(names):
        lines += _frame(partition, _partition(graph, partition, width - 4), width)
        lines += _below(graph, partition, names[number + 1 :], width)
    lines += _legend(width)
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _frame(title: str, body: list[str], width: int) -> list[str]:
    head = _clip(f"╔ {title} ", width - 1)
    return [
        head + "═" * (width - 1 - len(head)) + "╗",
        *(f"║ {_clip(line, width - 4).ljust(width - 4)} ║" for line in body),
        "╚" + "═" * (width - 2) + "╝",
    ]


def _legend(width: int) -> list[str]:
    text = "↻ loop   ≋ stream to another partition   [x] output of the request   name? may be absent"
    return ["", *textwrap.wrap(text, width)]


def _partition(graph: Graph, partition: str, width: int) -> list[str]:
    lines: list[str] = []
    for walk in graph.compiled(partition).values():
        lines += [*([""] if lines else []), *_walk(walk, width)]
    return lines


def _below(graph: Graph, partition: str, later: list[str], width: int) -> list[str]:
    """Return the lines of the streams that leave a partition."""
    lines: list[str] = []
    for stream in graph.streams:
        if stream not in _streams_of(graph, partition):
            continue
        arrow = "▼" if graph.consumer(stream) in later else "▶"
        into = f"{stream.into[0].name}.{stream.into[1]}"
        text = f"≋ {stream.name} → {into}   {policy_text(stream)}{_conditions(stream)}"
        parts = textwrap.wrap(text, width - 6, subsequent_indent="  ") or [text]
        lines += [f"   {'│' if number else arrow} {part}" for number, part in enumerate(parts)]
    return [_clip(line, width) for line in lines]


def _conditions(stream: Stream) -> str:
    accept = f" accepts {stream.accept.start} to {stream.accept.stop - 1}" if stream.accept is not None else ""
    if stream.reject:
        accept += f" rejects {', '.join(map(str, stream.reject))}"
    return accept + (f" flushed if {stream.flush_if}" if stream.flush_if is not None else "")


def _streams_of(graph: Graph, partition: str) -> list[Stream]:
    streams = (outlet.stream for walk in graph.compiled(partition).values() for outlet in _outlets(walk))
    return [stream for stream in streams if stream is not None]


# one walk


def _walk(walk: CompiledWalk, width: int) -> list[str]:
    inner = width - 2
    picture = _picture(walk)
    if max(map(len, picture), default=0) > inner:
        picture = _folded(walk, inner)
    lines = picture + [line for loop in walk.loops for line in _loop_lines(loop, inner)]
    routes = _routes(walk)
    if routes:
        lines += _packed(routes, inner)
    return [_clip(walk.name, width), *("  " + _clip(line, inner) for line in lines)]


def _packed(items: list[str], width: int) -> list[str]:
    """Pack as many whole items on a line as fit."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += "   " + item
        else:
            lines.append(item)
    return lines


def _layers(walk: CompiledWalk) -> list[list[CompiledTask]]:
    """Group tasks into layers by their longest path from an input."""
    depth: dict[int, int] = {}
    before = {t.index: {g for entry in t.inputs for g in walk.feeding(entry.source)} for t in walk.tasks}
    for _ in walk.tasks:  # as many rounds as the longest chain needs
        depth = {task: 1 + max((depth.get(one, 0) for one in givers), default=-1) for task, givers in before.items()}
    layers: list[list[CompiledTask]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for task in walk.tasks:
        layers[depth[task.index]].append(task)
    return layers


def _label(task: CompiledTask) -> str:
    return "↻ " * len(task.path) + task.name


def _columns(walk: CompiledWalk) -> list[list[str]]:
    """Return the columns of a drawing: inputs, tasks by layer, outputs."""
    taken: dict[str, None] = {}
    for task in walk.tasks:
        for port in _run_ports(walk, task):
            taken[port] = None
    columns = [[_label(task) for task in layer] for layer in _layers(walk)]
    left = list(dict.fromkeys(_outlet_text(outlet) for outlet in _outlets(walk)))
    return [column for column in ([*taken], *columns, left) if column]


def _run_ports(walk: CompiledWalk, task: CompiledTask) -> list[str]:
    ports = []
    for entry in task.inputs:
        name, carried = run_input(walk, entry.source)
        if name is not None:
            ports.append(name + ("?" if carried or entry.optional else ""))
    stream = walk.taps.get(task.index)
    if stream is not None:
        ports.append(f"≋{stream}")
    over = [walk.loops[n].loop.over for n in task.path if walk.loops[n].tap == task.index]
    return ports + [f"≋{stream.name}" for stream in over if stream is not None]


def _outlets(walk: CompiledWalk) -> list[Outlet]:
    outlets = [outlet for task in walk.tasks for outlet in task.outlets]
    return outlets + [outlet for loop in walk.loops for result in loop.results for outlet in result.outlets]


def _outlet_text(outlet: Outlet) -> str:
    return f"≋{outlet.stream.name}" if outlet.stream is not None else f"[{outlet.modality}]"


def _picture(walk: CompiledWalk) -> list[str]:
    """Draw columns side by side, joined by a bus."""
    columns = _columns(walk)
    height = max(len(column) for column in columns)
    rows = [""] * height
    for number, column in enumerate(columns):
        if number:
            bus = _bus(len(columns[number - 1]), len(column), height)
            rows = [row + joint for row, joint in zip(rows, bus, strict=True)]
        wide = max(map(len, column))
        last = number == len(columns) - 1
        for at in range(height):
            text = column[at] if at < len(column) else ""
            fill = "─" if text and not last else " "
            rows[at] += (text + " " if text and not last else text).ljust(wide + (not last), fill)
    return rows


def _bus(left: int, right: int, height: int) -> list[str]:
    """Return a bus that connects all rows of one column with all rows of the next."""
    span = max(left, right)
    lines = []
    for at in range(height):
        joins = (int(at < left), int(at < right), int(0 < at < span), int(at < span - 1))
        middle = _JOINTS.get(joins, " ")
        lines.append(("─" if at < left else " ") + middle + ("▶ " if at < right else "  "))
    return lines


def _folded(walk: CompiledWalk, width: int) -> list[str]:
    """Draw columns one below the other, for narrow terminals."""
    lines: list[str] = []
    for number, column in enumerate(_columns(walk)):
        if number:
            lines.append("  ▼")
        lines += textwrap.wrap(", ".join(column), width, break_long_words=True)
    return lines


def _loop_lines(loop: CompiledLoop, width: int) -> list[str]:
    facts = []
    if loop.loop.over is not None:
        facts.append(f"once per chunk of ≋{loop.loop.over.name}")
    if loop.variables:
        facts.append(
            "carries " + ", ".join(v.out if v.out == v.port else f"{v.out} → {v.port}" for v in loop.variables)
        )
    stop = loop.loop.stop
    if isinstance(stop, StopOn):
        unless = f" unless {stop.unless}" if stop.unless is not None else ""
        facts.append(f"stops on {stop.port} {', '.join(map(str, stop.ids))}{unless}")
    elif stop is not None:
        facts.append(f"stops when {stop.port}")
    if loop.loop.fused:
        facts.append("fused")
    text = f"↻ {loop.name}: {'; '.join(facts)}" if facts else f"↻ {loop.name}"
    return textwrap.wrap(text, width, subsequent_indent="  ")


def _routes(walk: CompiledWalk) -> list[str]:
    """Return each edge between nodes and to the outside as text."""
    routes: dict[str, None] = {}
    for task in walk.tasks:
        for entry in task.inputs:
            for giver in sorted(walk.feeding(entry.source)):
                routes[f"{walk.tasks[giver].name} → {task.name}.{entry.port}"] = None
        for outlet in task.outlets:
            routes[f"{task.name}.{outlet.port} → {_outlet_text(outlet)}"] = None
    for loop in walk.loops:
        for result in loop.results:
            for outlet in result.outlets:
                routes[f"{loop.name}.{outlet.port} → {_outlet_text(outlet)}"] = None
    return list(routes)
