"""Checks a model's graph: every contradiction with its place and the nearest name. Called when a plugin is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.compiled import CompiledWalk, Kind, Source
from mstar_core.graph.edges import Edge, FixedChunk, LeftContext, SlidingWindow, Stream, StreamingGraphEdge
from mstar_core.graph.nodes import CHUNK_FIRST, CHUNK_LAST, KV_CACHE, PARAM_PREFIX, STEP, NodeSpec, PortType
from mstar_core.graph.walks import GraphNode, Loop, StopOn, Walk, graph_nodes, loops, parts_of
from mstar_core.graph.wiring import is_special, wire

INTEGERS = frozenset({"i64", "i32", "i16", "u8", "any"})


def check_graph(
    nodes: Sequence[NodeSpec],
    streams: Sequence[Stream],
    partitions: Mapping[str, Mapping[str, Walk]],
    param_names: Collection[str],
) -> list[GraphError]:
    """All problems of a graph, in the order of nodes, walks and streams; empty when it is sound.

    partitions: name -> walk name -> walk. param_names: names of the model's parameters.
    """
    check = _Check({node.name: node for node in nodes}, tuple(streams), partitions, frozenset(param_names))
    check.names(nodes, streams)
    for node in nodes:
        check.node(node)
    for _, name, walk in check.walks():
        _WalkCheck(check, name).run(walk)
    for stream in streams:
        check.stream(stream)
    check.unused()
    return check.problems


def walk_inputs(walk: Walk, streams: Iterable[Stream] = ()) -> dict[str, PortType]:
    """Names that a Run of this walk gives. Optional: ports that may be absent or start from what they last held.

    streams: the model's streams, so that a port that takes a chunk is not counted. Raises GraphError.
    """
    compiled, problems = wire("walk", walk, streams)
    if compiled is None:
        raise problems[0]
    found: dict[str, PortType] = {}
    for task in compiled.tasks:
        for entry in task.inputs:
            name, carried = run_input(compiled, entry.source)
            if name is None:
                continue
            port = task.node.spec.port(entry.port)
            optional = (port.optional or carried) and (name not in found or found[name].optional)
            found[name] = PortType(dtype=port.dtype, shape=port.shape, optional=optional)
    return found


def run_input(walk: CompiledWalk, source: Source) -> tuple[str | None, bool]:
    """The Run's input behind a source (None: another origin), and whether it is only a starting value."""
    carried = False
    while source.kind in (Kind.VAR, Kind.IMPORT):
        loop = walk.loops[source.at]
        if source.kind is Kind.IMPORT:
            source = loop.imports[int(source.port)]
        else:
            carried = True
            source = next(variable.start for variable in loop.variables if variable.port == source.port)
    return (source.port if source.kind is Kind.RUN else None), carried


@dataclass(slots=True)
class _Check:
    """Working state of `check_graph`."""

    nodes: Mapping[str, NodeSpec]
    streams: tuple[Stream, ...]
    partitions: Mapping[str, Mapping[str, Walk]]
    params: frozenset[str]
    problems: list[GraphError] = field(default_factory=list)

    def problem(self, text: str, place: str, hint: str = "") -> None:
        self.problems.append(GraphError(text, hint=hint, place=place))

    def walks(self) -> Iterator[tuple[str, str, Walk]]:
        for partition, walks in self.partitions.items():
            for name, walk in walks.items():
                yield partition, name, walk

    def names(self, nodes: Sequence[NodeSpec], streams: Sequence[Stream]) -> None:
        named = {
            "nodes": [node.name for node in nodes],
            "streams": [stream.name for stream in streams],
            "walks": [name for _, name, _ in self.walks()],
        }
        for what, names in named.items():
            for name in sorted({name for name in names if names.count(name) > 1}):
                self.problem(f"two {what} are called {name!r}", name, "give each its own name")

    def param(self, name: str, place: str, where: str) -> None:
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

    # nodes

    def node(self, node: NodeSpec) -> None:
        for port, text in node.ports.items():
            try:
                PortType.parse(text, where=f"{node.name}.{port}")
            except GraphError as error:
                self.problems.append(error)
        if node.engine is KV_CACHE and node.kv is None:
            self.problem(
                f"node {node.name!r} keeps a cache but has no kv=KVSpec(...)",
                node.name,
                "give layers, kv_heads and head_dim",
            )
        if node.engine is not KV_CACHE and node.kv is not None:
            self.problem(f"node {node.name!r} has a KVSpec but keeps no cache", node.name, "make its engine KV_CACHE")
        if node.kv is not None and node.branch not in node.kv.branches:
            self.problem(
                f"node {node.name!r} runs on cache branch {node.branch!r}, which its KVSpec does not name",
                node.name,
                did_you_mean(node.branch, node.kv.branches),
            )
        if node.sampling is not None:
            self.has_port(node, node.sampling.port, f"node {node.name!r} samples into", node.name)
        for port in node.batch_key:
            self.has_port(node, port, f"batch_key of node {node.name!r} names", node.name)
        for port in node.sequence:
            self.has_port(node, port, f"sequence of node {node.name!r} names", node.name)
        if node.of is not None and node.of.name not in self.nodes:
            self.problem(
                f"node {node.name!r} is a branch of {node.of.name!r}, which is not among the nodes",
                node.name,
                did_you_mean(node.of.name, self.nodes),
            )

    def unused(self) -> None:
        used = {use.spec.name for _, _, walk in self.walks() for use in graph_nodes(walk)}
        for name in self.nodes:
            if name not in used:
                self.problem(f"node {name!r} is in no walk", name, "use it in a walk or leave it out")

    # streams

    def stream(self, stream: Stream) -> None:
        node, port = stream.into
        place = f"stream {stream.name}"
        if node.name not in self.nodes:
            self.problem(
                f"stream {stream.name!r} goes into node {node.name!r}, which does not exist",
                place,
                did_you_mean(node.name, self.nodes),
            )
            return
        self.has_port(node, port, f"stream {stream.name!r} goes into", place)
        self.policy(stream, place)
        if stream.flush_if is not None:
            self.param(stream.flush_if, place, f"flush_if of stream {stream.name!r}")
        producers = {p for p, _, walk in self.walks() if stream.name in _streams_out(walk)}
        consumers = {p for p, _, walk in self.walks() if _takes(walk, stream)}
        if len(producers) != 1:
            found = f"is produced by partitions {', '.join(sorted(producers))}" if producers else "has no producer"
            self.problem(f"stream {stream.name!r} {found}", place, "exactly one partition puts values on a stream")
        if not consumers:
            self.problem(
                f"stream {stream.name!r} has no consumer",
                place,
                f"take {node.name}.{port} in a walk, in a Loop(over=) of this stream or by itself",
            )
        elif len(consumers) > 1:
            self.problem(
                f"stream {stream.name!r} is taken by partitions {', '.join(sorted(consumers))}",
                place,
                "one partition takes a stream",
            )
        elif producers == consumers:
            self.problem(
                f"stream {stream.name!r} stays inside partition {next(iter(producers))!r}",
                place,
                "use a GraphEdge, or put the consumer into a partition of its own",
            )

    def policy(self, stream: Stream, place: str) -> None:
        match stream.chunk:
            case FixedChunk(size=size):
                sizes, least = {"size": size}, {"size": 1}
            case SlidingWindow(window=window, stride=stride):
                sizes, least = {"window": window, "stride": stride}, {"window": 1, "stride": 1}
            case LeftContext(chunk=chunk, left=left):
                sizes, least = {"chunk": chunk, "left": left}, {"chunk": 1, "left": 0}
        if isinstance(stream.chunk, LeftContext):
            for param in (stream.chunk.chunk_from, stream.chunk.left_from):
                if param is not None:
                    self.param(param, place, f"chunk policy of stream {stream.name!r}")
        for name, value in sizes.items():
            if value < least[name]:
                self.problem(
                    f"chunk policy of stream {stream.name!r} has {name}={value}",
                    place,
                    f"{name} is at least {least[name]}",
                )


class _WalkCheck:
    """Checks of one walk."""

    def __init__(self, check: _Check, name: str) -> None:
        self.check = check
        self.name = name

    def problem(self, text: str, place: str, hint: str = "") -> None:
        self.check.problem(f"walk {self.name!r} {text}", f"{self.name}.{place}", hint)

    def run(self, walk: Walk) -> None:
        before = len(self.check.problems)
        self.parts(walk, ())
        if len(self.check.problems) > before:
            return  # wiring would only repeat the same mistakes
        compiled, problems = wire(self.name, walk, self.check.streams)
        self.check.problems.extend(problems)
        if compiled is not None:
            self.types(compiled)
            self.cache_order(compiled)
            self.reaches(walk)

    def parts(self, walk: Walk, inside: tuple[Loop, ...]) -> None:
        """Names in nodes, loops and edges."""
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
            elif port.startswith(PARAM_PREFIX):
                where = f"walk {self.name!r}, node {spec.name!r}"
                self.check.param(port.removeprefix(PARAM_PREFIX), f"{self.name}.{spec.name}", where)
            else:
                self.has_port(spec, port, "takes")
        for edge in use.outputs:
            if is_special(edge.port):
                self.problem(f"sends {edge.port} of {spec.name!r}, which is an input", spec.name, "send an output port")
            elif self.has_port(spec, edge.port, "sends"):
                self.edge(edge, spec.name)

    def known(self, spec: NodeSpec) -> bool:
        """Whether a node is one of the model's."""
        declared = self.check.nodes.get(spec.name)
        if declared is None:
            self.problem(f"names node {spec.name!r}", spec.name, did_you_mean(spec.name, self.check.nodes))
        elif declared != spec:
            self.problem(
                f"uses a node {spec.name!r} that differs from the one declared",
                spec.name,
                "refer to the NodeSpec object of nodes=",
            )
        return declared == spec

    def has_port(self, spec: NodeSpec, port: str, verb: str) -> bool:
        text, place = f"walk {self.name!r} {verb}", f"{self.name}.{spec.name}"
        return self.check.has_port(spec, port, text, place)

    def edge(self, edge: Edge, owner: str) -> None:
        if isinstance(edge, StreamingGraphEdge):
            names = [stream.name for stream in self.check.streams]
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
                self.check.param(loop.stop.unless, f"{self.name}.{loop.name}", where)
            if not loop.stop.ids:
                self.problem(f"stops loop {loop.name!r} on no id", loop.name, "name the ids, or leave stop= out")
        targets = list(loop.carry.values())
        for port in sorted({port for port in targets if targets.count(port) > 1}):
            self.problem(
                f"carries two ports of loop {loop.name!r} into {port!r}", loop.name, "a carried port has one origin"
            )
        if loop.over is not None and loop.over.name not in [stream.name for stream in self.check.streams]:
            self.problem(
                f"runs loop {loop.name!r} over stream {loop.over.name!r}, which is not among the streams",
                loop.name,
                did_you_mean(loop.over.name, [s.name for s in self.check.streams]),
            )
        for edge in loop.outputs:
            self.edge(edge, loop.name)

    # what needs the wired walk

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
                wanted = "ids" if isinstance(stop, StopOn) else "a b8"
                self.problem(
                    f"stops loop {loop.name!r} on {spec.name}.{stop.port}, which is {dtype} and not {wanted}",
                    loop.name,
                    "stop on another port",
                )

    def origins(self, walk: CompiledWalk, source: Source) -> list[tuple[NodeSpec, str]]:
        """Nodes and ports whose values a source may give: a carried port has two, its start and its way back."""
        found: list[tuple[NodeSpec, str]] = []
        todo, seen = [source], set[Source]()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            match one.kind:
                case Kind.TASK:
                    found.append((walk.tasks[one.at].node.spec, one.port))
                case Kind.LOOP:
                    todo += [result.back for result in walk.loops[one.at].results if result.port == one.port]
                case Kind.VAR:
                    variables = [v for v in walk.loops[one.at].variables if v.port == one.port]
                    todo += [origin for variable in variables for origin in (variable.start, variable.back)]
                case Kind.IMPORT:
                    todo.append(walk.loops[one.at].imports[int(one.port)])
                case _:
                    pass
        return found

    def flows(self, giver: NodeSpec, port: str, taker: NodeSpec, into: str) -> None:
        given, taken = giver.port(port), taker.port(into)
        if not taken.accepts(given):
            self.problem(
                f"sends {giver.name}.{port} ({given}) into {taker.name}.{into} ({taken})",
                taker.name,
                "make the types agree",
            )

    def streams(self, giver: NodeSpec, port: str, stream: Stream) -> None:
        """Only the dtype is compared: a chunk joins items, so their shapes differ."""
        taker, into = stream.into
        if into not in taker.ports:
            return
        given, taken = giver.port(port), taker.port(into)
        if given.dtype != taken.dtype and "any" not in (given.dtype, taken.dtype):
            self.problem(
                f"puts {giver.name}.{port} ({given}) on stream {stream.name!r} into {taker.name}.{into} ({taken})",
                giver.name,
                "make the types agree",
            )

    def cache_order(self, walk: CompiledWalk) -> None:
        """A node with a cache that is used twice needs edges that say which use comes first."""
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
        edges = [edge for use in graph_nodes(walk) for edge in use.outputs]
        edges += [edge for loop in loops(walk) for edge in loop.outputs]
        out = any(isinstance(edge, StreamingGraphEdge) or edge.is_client for edge in edges)
        writes = any(
            use.spec.engine is KV_CACHE and (use.attend is None or use.attend.write) for use in graph_nodes(walk)
        )
        if not out and not writes:
            self.problem(
                "reaches no output, no stream and no cache",
                "outputs",
                "add an edge to CLIENT or to a stream, or let a node with a cache write to it",
            )


def _ordered(walk: CompiledWalk, first: int, second: int) -> bool:
    """Whether values flow from one task to the other, in either direction, within one pass."""
    return second in _upstream(walk, first) or first in _upstream(walk, second)


def _upstream(walk: CompiledWalk, task: int) -> set[int]:
    """Tasks that a task waits for, carried values of earlier iterations left out."""
    found: set[int] = set()
    todo = [entry.source for entry in walk.tasks[task].inputs]
    seen: set[Source] = set()
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        match source.kind:
            case Kind.TASK:
                found.add(source.at)
                todo += [entry.source for entry in walk.tasks[source.at].inputs]
            case Kind.LOOP:
                inside = walk.tasks_within(source.at)
                found.update(inside)
                todo += [entry.source for index in inside for entry in walk.tasks[index].inputs]
            case Kind.VAR:
                todo += [v.start for v in walk.loops[source.at].variables if v.port == source.port]
            case Kind.IMPORT:
                todo.append(walk.loops[source.at].imports[int(source.port)])
            case _:
                pass
    return found


def _streams_out(walk: Walk) -> set[str]:
    """Names of the streams that a walk puts values on."""
    edges = [edge for use in graph_nodes(walk) for edge in use.outputs]
    edges += [edge for loop in loops(walk) for edge in loop.outputs]
    return {edge.stream.name for edge in edges if isinstance(edge, StreamingGraphEdge)}


def _takes(walk: Walk, stream: Stream) -> bool:
    node, port = stream.into
    return any(use.spec.name == node.name and port in use.inputs for use in graph_nodes(walk))
