"""Checks of one walk: names, types along edges, order of uses of a cache, and outputs. Used by graph_check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.compile.compiled import CompiledWalk, Kind, Source
from mstar_core.graph.compile.resident import is_fixed, loop_ports
from mstar_core.graph.compile.wiring import is_special, wire
from mstar_core.graph.declare.nodes import (
    CHUNK_FIRST,
    CHUNK_LAST,
    KV_CACHE,
    PARAM_PREFIX,
    RANDOM,
    STEP,
    NodeSpec,
    keyword,
)
from mstar_core.graph.declare.streams import Stream
from mstar_core.graph.declare.walks import (
    Edge,
    GraphNode,
    Loop,
    StopOn,
    StreamingGraphEdge,
    Walk,
    edges_of,
    graph_nodes,
    loops,
    parts_of,
)

INTEGERS: Final = frozenset({"i64", "i32", "i16", "u8", "any"})


@dataclass(slots=True)
class Declared:
    """Names that a graph may refer to, and the problems found so far, in order."""

    nodes: Mapping[str, NodeSpec]
    streams: tuple[Stream, ...]
    params: frozenset[str]
    problems: list[GraphError] = field(default_factory=list)

    def problem(self, text: str, place: str, hint: str = "") -> None:
        self.problems.append(GraphError(text, hint=hint, place=place))

    def param(self, name: str, place: str, where: str) -> None:
        """Report a parameter that the model lacks."""
        if name not in self.params:
            self.problem(
                f"{where} names parameter {name!r}, which the model does not have",
                place,
                did_you_mean(name, self.params),
            )

    def has_port(self, spec: NodeSpec, port: str, text: str, place: str) -> bool:
        """Report a port that the node lacks."""
        if port in spec.ports:
            return True
        self.problem(
            f"{text} port {port!r}, which node {spec.name!r} does not have", place, did_you_mean(port, spec.ports)
        )
        return False


class WalkCheck:
    """Adds the problems of one walk to those of the graph."""

    def __init__(self, declared: Declared, name: str, others: Sequence[Walk] = ()) -> None:
        """others: walks of the same partition, which may start from a value of this one."""
        self.declared = declared
        self.name = name
        self.others = others

    def problem(self, text: str, place: str, hint: str = "") -> None:
        self.declared.problem(f"walk {self.name!r} {text}", f"{self.name}.{place}", hint)

    def run(self, walk: Walk) -> None:
        before = len(self.declared.problems)
        self.parts(walk, ())
        if len(self.declared.problems) > before:
            return  # wiring would report the same mistakes again
        compiled, problems = wire(self.name, walk, self.declared.streams)
        self.declared.problems.extend(problems)
        if compiled is not None:
            self.types(compiled)
            self.cache_order(compiled)
            self.reaches(walk)

    def parts(self, walk: Walk, inside: tuple[Loop, ...]) -> None:
        """Check the names in nodes, loops and edges."""
        match walk:
            case GraphNode():
                self.use(walk, inside)
            case Loop():
                self.loop(walk)
                for part in parts_of(walk):
                    self.parts(part, (*inside, walk))
            case _:
                for part in parts_of(walk):
                    self.parts(part, inside)

    def use(self, use: GraphNode, inside: tuple[Loop, ...]) -> None:
        spec = use.spec
        if not self.known(spec):
            return
        if use.attend is not None and spec.engine is not KV_CACHE:
            self.problem(f"gives attend= to node {spec.name!r}, which keeps no cache", spec.name, "leave attend= out")
        if use.suppress and (inside or spec.sampling is None):
            where = "inside a loop" if inside else "which draws no ids"
            self.problem(f"gives suppress= to {spec.name!r} {where}", spec.name, "use Sampling.suppress of the node")
        for port in use.inputs:
            if port in (CHUNK_FIRST, CHUNK_LAST):
                if not any(loop.over is not None for loop in inside):
                    self.problem(
                        f"gives {port} to {spec.name!r} outside a loop over a stream",
                        spec.name,
                        "put the node into a Loop(over=)",
                    )
            elif port == STEP:
                if not inside:
                    self.problem(f"gives {port} to {spec.name!r} outside a loop", spec.name, "put the node into a Loop")
            elif port == RANDOM:
                self.random(use, inside)
            elif port.startswith(PARAM_PREFIX):
                where = f"walk {self.name!r}, node {spec.name!r}"
                self.declared.param(port.removeprefix(PARAM_PREFIX), f"{self.name}.{spec.name}", where)
            else:
                self.has_port(spec, port, "takes")
        for edge in use.outputs:
            if is_special(edge.port):
                self.problem(f"sends {edge.port} of {spec.name!r}, which is an input", spec.name, "send an output port")
            elif self.has_port(spec, edge.port, "sends"):
                self.edge(edge, spec.name)

    def random(self, use: GraphNode, inside: tuple[Loop, ...]) -> None:
        """Report random numbers outside a resident loop, and a node without a port for them."""
        spec, port = use.spec, keyword(RANDOM)
        if not self.has_port(spec, port, f"gives {RANDOM} as"):
            return
        kind = spec.port(port)
        if kind.dtype != "f32" or not is_fixed(spec, port):
            self.problem(
                f"gives {RANDOM} to port {port!r} of {spec.name!r}, whose type is {kind}",
                spec.name,
                'declare it as float32 of a fixed shape, such as "f32[15]"',
            )
        elif not inside or inside[-1].body != use or loop_ports(inside[-1], use) is None:
            self.problem(
                f"gives {RANDOM} to {spec.name!r} outside a resident loop",
                spec.name,
                "put the node alone into a Loop that carries its sampled id and inputs of fixed shapes",
            )

    def known(self, spec: NodeSpec) -> bool:
        """Whether a node is declared. Reports one that is not."""
        declared = self.declared.nodes.get(spec.name)
        if declared is None:
            self.problem(f"names node {spec.name!r}", spec.name, did_you_mean(spec.name, self.declared.nodes))
        elif declared != spec:
            self.problem(
                f"uses a node {spec.name!r} that differs from the one declared",
                spec.name,
                "refer to the NodeSpec object of nodes=",
            )
        return declared == spec

    def has_port(self, spec: NodeSpec, port: str, verb: str) -> bool:
        text, place = f"walk {self.name!r} {verb}", f"{self.name}.{spec.name}"
        return self.declared.has_port(spec, port, text, place)

    def edge(self, edge: Edge, owner: str) -> None:
        if isinstance(edge, StreamingGraphEdge):
            names = [stream.name for stream in self.declared.streams]
            if edge.stream.name not in names:
                self.problem(
                    f"puts port {edge.port!r} of {owner!r} on stream {edge.stream.name!r}, which is not "
                    "among the streams",
                    owner,
                    did_you_mean(edge.stream.name, names),
                )
        elif edge.is_client:
            if edge.modality is None:
                self.problem(
                    f"emits port {edge.port!r} of {owner!r} without a modality",
                    owner,
                    'write modality="text" or another output modality of the model',
                )
        elif isinstance(edge.to, NodeSpec):
            if self.known(edge.to):
                self.has_port(edge.to, edge.target_port, f"sends port {edge.port!r} of {owner!r} into")
        else:
            self.problem(
                f"sends port {edge.port!r} of {owner!r} to the text {edge.to!r}",
                owner,
                "refer to a node by its NodeSpec object, or to CLIENT",
            )

    def loop(self, loop: Loop) -> None:
        if isinstance(loop.stop, StopOn):
            if loop.stop.unless is not None:
                where = f"walk {self.name!r}, unless= of loop {loop.name!r}"
                self.declared.param(loop.stop.unless, f"{self.name}.{loop.name}", where)
            if not loop.stop.ids:
                self.problem(f"stops loop {loop.name!r} on no id", loop.name, "name the ids, or leave stop= out")
        targets = list(loop.carry.values())
        for port in sorted({port for port in targets if targets.count(port) > 1}):
            self.problem(
                f"carries two ports of loop {loop.name!r} into {port!r}", loop.name, "a carried port has one origin"
            )
        if loop.over is not None and loop.over.name not in [stream.name for stream in self.declared.streams]:
            self.problem(
                f"runs loop {loop.name!r} over stream {loop.over.name!r}, which is not among the streams",
                loop.name,
                did_you_mean(loop.over.name, [s.name for s in self.declared.streams]),
            )
        for edge in loop.outputs:
            self.edge(edge, loop.name)

    # checks of the compiled walk

    def types(self, walk: CompiledWalk) -> None:
        for task in walk.tasks:
            for entry in task.inputs:
                for spec, port in self.origins(walk, entry.source):
                    self.flows(spec, port, task.node.spec, entry.port)
            for outlet in task.outlets:
                if outlet.stream is not None:
                    self.streams(task.node.spec, outlet.port, outlet.stream)
        for loop in walk.loops:
            stop = loop.loop.stop
            if stop is None or loop.stop_task is None:
                continue
            spec = walk.tasks[loop.stop_task].node.spec
            dtype = spec.port(stop.port).dtype
            if dtype not in (INTEGERS if isinstance(stop, StopOn) else ("b8", "any")):
                expected = "ids" if isinstance(stop, StopOn) else "a b8"
                self.problem(
                    f"stops loop {loop.name!r} on {spec.name}.{stop.port}, which is {dtype} and not {expected}",
                    loop.name,
                    "stop on another port",
                )

    def origins(self, walk: CompiledWalk, source: Source) -> list[tuple[NodeSpec, str]]:
        """Return the nodes and ports behind a source. A carried port has two: its start and its way back."""
        origins: list[tuple[NodeSpec, str]] = []
        todo, seen = [source], set[Source]()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            match one.kind:
                case Kind.TASK:
                    origins.append((walk.tasks[one.at].node.spec, one.port))
                case Kind.LOOP:
                    todo += [result.back for result in walk.loops[one.at].results if result.port == one.port]
                case Kind.VAR:
                    variables = [v for v in walk.loops[one.at].variables if v.port == one.port]
                    todo += [origin for variable in variables for origin in (variable.start, variable.back)]
                case Kind.IMPORT:
                    todo.append(walk.loops[one.at].imports[int(one.port)])
                case _:
                    pass
        return origins

    def flows(self, giver: NodeSpec, port: str, taker: NodeSpec, into: str) -> None:
        produced, taken = giver.port(port), taker.port(into)
        if not taken.accepts(produced):
            self.problem(
                f"sends {giver.name}.{port} ({produced}) into {taker.name}.{into} ({taken})",
                taker.name,
                "make the types agree",
            )

    def streams(self, giver: NodeSpec, port: str, stream: Stream) -> None:
        """Compare dtypes only: a chunk joins items, so shapes differ."""
        taker, into = stream.into
        if into not in taker.ports:
            return
        produced, taken = giver.port(port), taker.port(into)
        if produced.dtype != taken.dtype and "any" not in (produced.dtype, taken.dtype):
            self.problem(
                f"puts {giver.name}.{port} ({produced}) on stream {stream.name!r} into {taker.name}.{into} ({taken})",
                giver.name,
                "make the types agree",
            )

    def cache_order(self, walk: CompiledWalk) -> None:
        """Report two uses of a node with a cache whose order no edge determines."""
        uses = [task for task in walk.tasks if task.node.spec.engine is KV_CACHE]
        for number, first in enumerate(uses):
            for second in uses[number + 1 :]:
                if first.name == second.name and not _ordered(walk, first.index, second.index):
                    self.problem(
                        f"uses node {first.name!r} twice with nothing that says which comes first",
                        first.name,
                        "join the two uses by an edge, or write two walks",
                    )

    def reaches(self, walk: Walk) -> None:
        """Report a walk without any effect."""
        out = any(isinstance(edge, StreamingGraphEdge) or edge.is_client for edge in edges_of(walk))
        writes = any(
            use.spec.engine is KV_CACHE and (use.attend is None or use.attend.write) for use in graph_nodes(walk)
        )
        if not out and not writes and not self._is_kept(walk):
            self.problem(
                "reaches no output, no stream and no cache",
                "outputs",
                "add an edge to CLIENT or to a stream, or let a node with a cache write to it",
            )

    def _is_kept(self, walk: Walk) -> bool:
        """Return whether another walk takes a port that this one ends with: kept by the program, or a last value."""
        ends = {port for loop in loops(walk) for port in loop.carry}
        ends |= {
            port
            for use in graph_nodes(walk)
            for port in use.spec.ports
            if use.spec.engine is not KV_CACHE and not use.outputs and port not in use.inputs
        }
        return any(ends & set(use.inputs) for other in self.others for use in graph_nodes(other))


def _ordered(walk: CompiledWalk, first: int, second: int) -> bool:
    """Whether values flow from one task to the other, in either direction, within one pass."""
    return second in _upstream(walk, first) or first in _upstream(walk, second)


def _upstream(walk: CompiledWalk, task: int) -> set[int]:
    """Return the tasks that a task waits for, without carried values of earlier iterations."""
    upstream: set[int] = set()
    todo = [entry.source for entry in walk.tasks[task].inputs]
    seen: set[Source] = set()
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        match source.kind:
            case Kind.TASK:
                upstream.add(source.at)
                todo += [entry.source for entry in walk.tasks[source.at].inputs]
            case Kind.LOOP:
                inside = walk.tasks_within(source.at)
                upstream.update(inside)
                todo += [entry.source for index in inside for entry in walk.tasks[index].inputs]
            case Kind.VAR:
                todo += [v.start for v in walk.loops[source.at].variables if v.port == source.port]
            case Kind.IMPORT:
                todo.append(walk.loops[source.at].imports[int(source.port)])
            case _:
                pass
    return upstream
