"""Random walks for the readiness properties, and a plain interpreter that says what has to happen in them.

The plan (names and origins of every value) is made first; the Walk is written from it with edges, carries and loops.
The interpreter follows the plan in the order written, one firing after the other, and knows nothing of the runtime.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    FixedChunk,
    GraphEdge,
    GraphNode,
    KVSpec,
    Loop,
    NodeSpec,
    Parallel,
    Sequential,
    StopWhen,
    Stream,
    StreamingGraphEdge,
    Walk,
)

Origin = tuple[Any, ...]
LONGEST = 3
SINK = NodeSpec(name="sink", engine=STATELESS, ports={"x": "any"})


def content(*parts: object) -> int:
    """A value's content: a checksum of everything it came from."""
    return zlib.crc32(repr(parts).encode())


def is_produced(value: int) -> bool:
    return value % 7 != 0


def says_stop(value: int) -> bool:
    return value % 4 == 1


@dataclass
class NodePlan:
    name: str
    inputs: list[tuple[str, Origin, bool]] = field(default_factory=list)
    outs: list[str] = field(default_factory=list)
    client: list[str] = field(default_factory=list)
    streamed: list[str] = field(default_factory=list)
    branch: str | None = None
    stream: str | None = None


@dataclass
class CarryPlan:
    out: str
    port: str
    producer: str
    start: Origin
    taker: str


@dataclass
class LoopPlan:
    name: str
    body: list[NodePlan | LoopPlan]
    carries: list[CarryPlan] = field(default_factory=list)
    stop: tuple[str, str] | None = None
    over: tuple[str, str] | None = None
    after_end: str = "stop"
    limit: int | None = LONGEST
    handed: list[tuple[str, str]] = field(default_factory=list)
    client: list[str] = field(default_factory=list)

    @property
    def runs_in_engine(self) -> bool:
        return len(self.body) == 1 and bool(self.direct()) and self.direct()[0].stream is None

    def nodes(self) -> list[NodePlan]:
        return [n for part in self.body for n in ([part] if isinstance(part, NodePlan) else part.nodes())]

    def direct(self) -> list[NodePlan]:
        return [part for part in self.body if isinstance(part, NodePlan)]


@dataclass
class WalkPlan:
    body: list[NodePlan | LoopPlan]
    given: set[str]
    branches: tuple[str, ...]
    chunks: dict[str, int]

    def all_loops(self) -> list[LoopPlan]:
        loops: list[LoopPlan] = []
        todo = [part for part in self.body if isinstance(part, LoopPlan)]
        while todo:
            loop = todo.pop(0)
            loops.append(loop)
            todo += [part for part in loop.body if isinstance(part, LoopPlan)]
        return loops

    def all_nodes(self) -> list[NodePlan]:
        return LoopPlan("root", self.body).nodes()

    @property
    def limits(self) -> dict[str, int]:
        return {loop.name: loop.limit for loop in self.all_loops() if loop.limit is not None}


class Maker:
    """Draws a plan."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = 0
        self.runs: set[str] = set()
        self.chunks: dict[str, int] = {}

    def plan(self) -> WalkPlan:
        body = self.frame([], 0)
        names = {name for name in sorted(self.runs) if self.rng.random() < 0.8}
        branches = self.rng.choice([("main",), ("main", "alt"), ("main", "alt", "other")])
        return WalkPlan(body, names, branches, self.chunks)

    def frame(self, seen: list[Origin], depth: int) -> list[NodePlan | LoopPlan]:
        seen = list(seen)
        parts: list[NodePlan | LoopPlan] = []
        for _ in range(self.rng.randint(1, 3)):
            if depth < 3 and self.rng.random() < 0.4:
                loop = self.loop(seen, depth)
                parts.append(loop)
                seen += [("handed", loop.name, port) for _, port in loop.handed]
            else:
                node = self.node(seen)
                parts.append(node)
                seen += [("out", node.name, port) for port in node.outs]
        return parts

    def node(self, seen: list[Origin]) -> NodePlan:
        self.count += 1
        node = NodePlan(f"n{self.count}")
        for number in range(self.rng.randint(0, 3)):
            port, optional = f"{node.name}_i{number}", self.rng.random() < 0.4
            draw = self.rng.random()
            if seen and draw < 0.7:
                node.inputs.append((port, self.rng.choice(seen), optional))
            elif draw < 0.9:
                self.runs.add(port)
                node.inputs.append((port, ("run", port), optional))
            else:
                node.inputs.append((port, ("step",), False))
        node.outs = [f"{node.name}_o{number}" for number in range(self.rng.randint(1, 2))]
        node.client = [port for port in node.outs if self.rng.random() < 0.3]
        node.streamed = [port for port in node.outs if self.rng.random() < 0.15]
        if self.rng.random() < 0.2:
            node.branch = self.rng.choice(["main", "alt"])
        if self.rng.random() < 0.1:
            self.tap(node, ("chunk", node.name))
        return node

    def tap(self, node: NodePlan, origin: Origin) -> str:
        node.stream = f"s_{node.name}"
        self.chunks[node.stream] = self.rng.randint(0, 3)
        node.inputs.append((f"{node.name}_chunk", origin, self.rng.random() < 0.5))
        return node.stream

    def loop(self, seen: list[Origin], depth: int) -> LoopPlan:
        self.count += 1
        loop = LoopPlan(f"l{self.count}", self.frame(seen, depth + 1))
        nodes, direct = loop.nodes(), loop.direct()
        for number in range(self.rng.randint(0, 2)):
            self.carry(loop, number, nodes, seen)
        if direct and self.rng.random() < 0.5:
            judge = self.rng.choice(direct)
            carried = [carry for carry in loop.carries if carry.producer in [node.name for node in direct]]
            if carried and self.rng.random() < 0.6:
                loop.stop = (carried[0].producer, carried[0].out)
            else:
                loop.stop = (judge.name, judge.outs[0])
        free = [node for node in direct if node.stream is None]
        if free and self.rng.random() < 0.3:
            node = self.rng.choice(free)
            loop.over = (node.name, self.tap(node, ("over", loop.name)))
            loop.after_end = self.rng.choice(["stop", "empty"])
        open_ended = loop.stop is not None or loop.over is not None
        loop.limit = self.rng.choice([0, 1, 2, LONGEST, *([None, None] if open_ended else [])])
        for _ in range(self.rng.randint(0, 2)):
            node = self.rng.choice(nodes)
            loop.handed.append((node.name, self.rng.choice(node.outs)))
        loop.client = [port for _, port in dict.fromkeys(loop.handed) if self.rng.random() < 0.3]
        return loop

    def carry(self, loop: LoopPlan, number: int, nodes: list[NodePlan], seen: list[Origin]) -> None:
        producer = self.rng.choice(nodes)
        out, port = self.rng.choice(producer.outs), f"{loop.name}_c{number}"
        if out in [carry.out for carry in loop.carries]:
            return
        takers = self.rng.sample(nodes, k=min(len(nodes), self.rng.randint(1, 2)))
        for taker in takers:
            taker.inputs.append((port, ("carry", loop.name, port), self.rng.random() < 0.5))
        start: Origin = ("run", port)
        if seen and self.rng.random() < 0.4:
            start = self.rng.choice(seen)
        else:
            self.runs.add(port)
        loop.carries.append(CarryPlan(out, port, producer.name, start, takers[0].name))


class Writer:
    """Writes a plan as a Walk."""

    def __init__(self, plan: WalkPlan, seed: int) -> None:
        self.plan = plan
        self.rng = random.Random(seed)
        self.sink = Stream("out", into=(SINK, "x"), chunk=FixedChunk(1))
        self.specs = {node.name: self.spec(node) for node in plan.all_nodes()}
        self.streams = self.input_streams()
        self.edges: dict[tuple[str, str], list[GraphEdge | StreamingGraphEdge]] = {}
        self.find_edges()

    def spec(self, node: NodePlan) -> NodeSpec:
        ports = {port: "any?" if optional else "any" for port, _, optional in node.inputs}
        ports |= dict.fromkeys(node.outs, "any")
        if node.branch is None:
            return NodeSpec(name=node.name, engine=STATELESS, ports=ports)
        kv = KVSpec(layers=1, kv_heads=1, head_dim=1, branches=("main", "alt", "other"))
        parent = NodeSpec(name="base" if node.branch == "alt" else node.name, engine=KV_CACHE, ports=ports, kv=kv)
        return parent.on_branch(node.name, "alt") if node.branch == "alt" else parent

    def input_streams(self) -> dict[str, Stream]:
        after = {loop.over[1]: loop.after_end for loop in self.plan.all_loops() if loop.over is not None}
        return {
            node.stream: Stream(
                node.stream,
                into=(self.specs[node.name], f"{node.name}_chunk"),
                chunk=FixedChunk(1, after_end="empty" if after.get(node.stream) == "empty" else "stop"),
            )
            for node in self.plan.all_nodes()
            if node.stream is not None
        }

    def find_edges(self) -> None:
        for node in self.plan.all_nodes():
            for port, origin, _ in node.inputs:
                self.edge(origin, node.name, port)
            for port in node.client:
                self.add(("out", node.name, port), GraphEdge(port, CLIENT, modality="text"))
            for port in node.streamed:
                self.add(("out", node.name, port), StreamingGraphEdge(port, self.sink))
        for loop in self.plan.all_loops():
            for carry in loop.carries:
                self.edge(carry.start, carry.taker, carry.port)
            for port in loop.client:
                self.add(("handed", loop.name, port), GraphEdge(port, CLIENT, modality="text"))

    def edge(self, origin: Origin, taker: str, port: str) -> None:
        if origin[0] in ("out", "handed"):
            self.add(origin, GraphEdge(origin[2], self.specs[taker], into=port))

    def add(self, origin: Origin, edge: GraphEdge | StreamingGraphEdge) -> None:
        self.edges.setdefault((origin[0], origin[1]), []).append(edge)

    def walk(self) -> Walk:
        return self.wrap([self.part(part) for part in self.plan.body])

    def wrap(self, parts: list[Walk]) -> Walk:
        """Group parts at random: composition does not change what runs."""
        if len(parts) == 1 and self.rng.random() < 0.7:
            return parts[0]
        at = self.rng.randint(0, len(parts))
        kind = self.rng.choice([Sequential, Parallel])
        return kind(*parts[:at], *([Sequential(*parts[at:])] if parts[at:] else []))

    def part(self, part: NodePlan | LoopPlan) -> Walk:
        if isinstance(part, NodePlan):
            inputs = tuple(STEP if origin == ("step",) else port for port, origin, _ in part.inputs)
            return GraphNode(self.specs[part.name], inputs, tuple(self.edges.get(("out", part.name), ())))
        return Loop(
            part.name,
            self.wrap([self.part(inner) for inner in part.body]),
            carry={carry.out: carry.port for carry in part.carries},
            over=self.streams[part.over[1]] if part.over else None,
            stop=StopWhen(part.stop[1]) if part.stop else None,
            outputs=tuple(self.edges.get(("handed", part.name), ())),
        )


class Interpreter:
    """Runs a plan in the order written."""

    def __init__(self, plan: WalkPlan) -> None:
        self.plan = plan
        self.now: dict[Origin, int | None] = {}
        self.held: dict[tuple[str, str], int] = {}
        self.left = dict(plan.chunks)
        self.taken = dict.fromkeys(plan.chunks, 0)
        self.firings: dict[tuple[str, tuple[int, ...]], dict[str, int]] = {}
        self.emitted: list[tuple[str, int, tuple[int, ...]]] = []
        self.streamed: list[tuple[str, int, tuple[int, ...]]] = []
        self.counts: dict[str, int] = {}

    def run(self) -> Interpreter:
        self.parts(self.plan.body, ())
        return self

    def parts(self, parts: list[NodePlan | LoopPlan], path: tuple[int, ...]) -> None:
        for part in parts:
            if isinstance(part, NodePlan):
                self.fire(part, path)
            else:
                self.loop(part, path)

    def value(self, origin: Origin, path: tuple[int, ...]) -> int | None:
        match origin:
            case ("run", name):
                return content("run", name) if name in self.plan.given else None
            case ("step",):
                return path[-1] if path else 0
            case ("chunk", node):
                return self.take(f"s_{node}")
            case _:
                return self.now.get(origin)

    def take(self, stream: str) -> int | None:
        if not self.left[stream]:
            return None
        self.left[stream] -= 1
        self.taken[stream] += 1
        return content("chunk", stream, self.taken[stream])

    def takes_part(self, node: NodePlan) -> bool:
        if node.branch != "alt":
            return True
        return "alt" in self.plan.branches

    def fire(self, node: NodePlan, path: tuple[int, ...]) -> None:
        inputs: dict[str, int] = {}
        complete = True
        for port, origin, optional in node.inputs:
            value = self.value(origin, path)
            if value is not None:
                inputs["$step" if origin == ("step",) else port] = value
            is_needed = not optional or (
                origin[0] == "chunk" and not path
            )  # an ended stream skips a task outside loops
            complete = complete and (value is not None or not is_needed)
        runs = complete and self.takes_part(node)
        if runs:
            self.firings[node.name, path] = inputs
        for port in node.outs:
            value_of_port = content(node.name, port, path, sorted(inputs.items()))
            value = value_of_port if runs and is_produced(value_of_port) else None
            self.now["out", node.name, port] = value
            if value is None:
                continue
            self.held[node.name, port] = value
            self.emitted += [(port, value, path)] * (port in node.client)
            self.streamed += [(port, value, path)] * (port in node.streamed)

    def of_held(self, node: str, port: str) -> int:
        return self.held.get((node, port), content("held", node, port))

    def loop(self, loop: LoopPlan, path: tuple[int, ...]) -> None:
        values: dict[str, int | None] = {}
        for carry in loop.carries:
            start = self.value(carry.start, path)
            if start is None and carry.start[0] == "run":
                start = self.of_held(carry.producer, carry.out)
            values[carry.out] = start
        index, ended = 0, loop.limit == 0
        if not ended and loop.runs_in_engine and not self.can_begin(loop, values, path):
            ended, values = True, dict.fromkeys(values)
        ended = ended or self.stops_at_start(loop, values)
        while not ended:
            chunk: int | None = None
            if loop.over is not None:
                chunk = self.take(loop.over[1])
                goes_on = loop.after_end == "empty" and (loop.stop is not None or loop.limit is not None)
                if chunk is None and not goes_on:
                    break
            self.now["over", loop.name] = chunk
            for carry in loop.carries:
                self.now["carry", loop.name, carry.port] = values[carry.out]
            self.parts(loop.body, (*path, index))
            for carry in loop.carries:
                values[carry.out] = self.last(loop, carry.producer, carry.out)
            index += 1
            ended = self.stops_after(loop, (*path, index - 1)) or (loop.limit is not None and index >= loop.limit)
        self.counts[loop.name] = self.counts.get(loop.name, 0) + index
        for node, port in dict.fromkeys(loop.handed):
            value = values[port] if port in values else (self.last(loop, node, port) if index else None)
            self.now["handed", loop.name, port] = value
            if value is not None and port in loop.client:
                self.emitted.append((port, value, path))
        self.now |= {("result", loop.name, out): value for out, value in values.items()}
        self.now[("iterated", loop.name)] = index

    def can_begin(self, loop: LoopPlan, values: dict[str, int | None], path: tuple[int, ...]) -> bool:
        """A loop that is one job of the engine is handed over only when its node could run."""
        node = loop.direct()[0]
        for carry in loop.carries:
            self.now["carry", loop.name, carry.port] = values[carry.out]
        required = [origin for _, origin, optional in node.inputs if not optional]
        return self.takes_part(node) and all(self.value(origin, path) is not None for origin in required)

    def last(self, loop: LoopPlan, node: str, port: str) -> int | None:
        """Return the last value of a node of the body; from inner loops, their result."""
        if any(direct.name == node for direct in loop.direct()):
            return self.now["out", node, port]
        inner = next(p for p in loop.body if isinstance(p, LoopPlan) and node in [n.name for n in p.nodes()])
        if port in [carry.out for carry in inner.carries]:
            return self.now["result", inner.name, port]
        return self.last(inner, node, port) if self.now[("iterated", inner.name)] else None

    def stops_at_start(self, loop: LoopPlan, values: dict[str, int | None]) -> bool:
        if loop.stop is None:
            return False
        node, port = loop.stop
        if port in values:
            start = values[port]
            return start is not None and says_stop(start)
        held = [carry.start[0] == "run" and carry.start[1] not in self.plan.given for carry in loop.carries]
        return bool(held) and all(held) and says_stop(self.of_held(node, port))

    def stops_after(self, loop: LoopPlan, path: tuple[int, ...]) -> bool:
        if loop.stop is None:
            return False
        node, port = loop.stop
        if (node, path) not in self.firings:
            return True
        value = self.now["out", node, port]
        return path[-1] >= LONGEST or (value is not None and says_stop(value))
