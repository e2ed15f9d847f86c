"""Checks of a model's graph. Every problem has its place and the nearest name. Called when a plugin is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.check.walk_check import Declared, WalkCheck
from mstar_core.graph.compile.compiled import CompiledWalk, Kind, Source
from mstar_core.graph.compile.wiring import wire
from mstar_core.graph.declare.nodes import KV_CACHE, STATELESS, EngineHints, NodeSpec, PortType
from mstar_core.graph.declare.streams import ChunkPolicy, FixedChunk, LeftContext, SlidingWindow, Stream
from mstar_core.graph.declare.walks import StreamingGraphEdge, Walk, edges_of, graph_nodes


def check_graph(
    nodes: Sequence[NodeSpec],
    streams: Sequence[Stream],
    partitions: Mapping[str, Mapping[str, Walk]],
    param_names: Collection[str],
) -> list[GraphError]:
    """Return all problems of a graph, in the order of nodes, walks and streams.

    partitions: name -> walk name -> walk. param_names: names of the model's parameters. Names of one kind are unique.
    """
    declared = Declared({node.name: node for node in nodes}, tuple(streams), frozenset(param_names))
    check = _Check(declared, partitions)
    for node in nodes:
        check.node(node)
    for partition, name, walk in check.walks():
        others = [other for other_name, other in partitions[partition].items() if other_name != name]
        WalkCheck(declared, name, others).run(walk)
    for stream in streams:
        check.stream(stream)
    check.unused()
    return declared.problems


def walk_inputs(walk: Walk, streams: Iterable[Stream] = ()) -> dict[str, PortType]:
    """Return the inputs of a Run of this walk. A port is optional if it may be absent or start from its last value.

    streams: the model's streams; ports that take chunks are not counted. Raises GraphError.
    """
    compiled, problems = wire("walk", walk, streams)
    if compiled is None:
        raise problems[0]
    inputs: dict[str, PortType] = {}
    for task in compiled.tasks:
        for entry in task.inputs:
            name, carried = run_input(compiled, entry.source)
            if name is None:
                continue
            port = task.node.spec.port(entry.port)
            optional = (port.optional or carried) and (name not in inputs or inputs[name].optional)
            inputs[name] = PortType(dtype=port.dtype, shape=port.shape, optional=optional)
    return inputs


def run_input(walk: CompiledWalk, source: Source) -> tuple[str | None, bool]:
    """Return the Run's input behind a source (None: another origin), and whether it is only a starting value."""
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
    """Checks of nodes and streams."""

    declared: Declared
    partitions: Mapping[str, Mapping[str, Walk]]

    def walks(self) -> Iterator[tuple[str, str, Walk]]:
        for partition, walks in self.partitions.items():
            for name, walk in walks.items():
                yield partition, name, walk

    # nodes

    def node(self, node: NodeSpec) -> None:
        for port, text in node.ports.items():
            try:
                PortType.parse(text, where=f"{node.name}.{port}")
            except GraphError as error:
                self.declared.problems.append(error)
        if node.engine is KV_CACHE and node.kv is None:
            self.declared.problem(
                f"node {node.name!r} keeps a cache but has no kv=KVSpec(...)",
                node.name,
                "give layers, kv_heads and head_dim",
            )
        if node.engine is not KV_CACHE and node.kv is not None:
            self.declared.problem(
                f"node {node.name!r} has a KVSpec but keeps no cache", node.name, "make its engine KV_CACHE"
            )
        if node.engine is not KV_CACHE and node.hints != EngineHints():
            self.declared.problem(
                f"node {node.name!r} has hints, which mean nothing to its engine", node.name, "leave them out"
            )
        if node.kv is not None and node.branch not in node.kv.branches:
            self.declared.problem(
                f"node {node.name!r} runs on cache branch {node.branch!r}, which its KVSpec does not name",
                node.name,
                did_you_mean(node.branch, node.kv.branches),
            )
        if node.sampling is not None:
            self.declared.has_port(node, node.sampling.port, f"node {node.name!r} samples into", node.name)
        for field, ports, engine in (
            ("batch_key", node.batch_key, None),
            ("sequence", node.sequence, None),
            ("row_ports", node.row_ports, KV_CACHE),
            ("ragged", node.ragged, STATELESS),
        ):
            for port in ports:
                self.declared.has_port(node, port, f"{field} of node {node.name!r} names", node.name)
            if ports and engine is not None and node.engine is not engine:
                self.declared.problem(
                    f"node {node.name!r} has {field}, which mean nothing to its engine", node.name, "leave them out"
                )
        for attached in node.kv.attached if node.kv is not None else ():
            self.declared.has_port(node, attached.port, f"attached of node {node.name!r} names", node.name)
        for port in sorted({*node.step_ports} - {*node.row_ports}):
            self.declared.problem(
                f"step_ports of node {node.name!r} name {port!r}, which is not among its row_ports",
                node.name,
                "name it in both",
            )
        if node.of is not None and node.of.name not in self.declared.nodes:
            self.declared.problem(
                f"node {node.name!r} is a branch of {node.of.name!r}, which is not among the nodes",
                node.name,
                did_you_mean(node.of.name, self.declared.nodes),
            )

    def unused(self) -> None:
        used = {use.spec.name for _, _, walk in self.walks() for use in graph_nodes(walk)}
        for name in self.declared.nodes:
            if name not in used:
                self.declared.problem(f"node {name!r} is in no walk", name, "use it in a walk or leave it out")

    # streams

    def stream(self, stream: Stream) -> None:
        node, port = stream.into
        place = f"stream {stream.name}"
        if node.name not in self.declared.nodes:
            self.declared.problem(
                f"stream {stream.name!r} goes into node {node.name!r}, which does not exist",
                place,
                did_you_mean(node.name, self.declared.nodes),
            )
            return
        self.declared.has_port(node, port, f"stream {stream.name!r} goes into", place)
        self.policy(stream, place)
        if stream.flush_if is not None:
            self.declared.param(stream.flush_if, place, f"flush_if of stream {stream.name!r}")
        producers = {p for p, _, walk in self.walks() if stream.name in _streams_out(walk)}
        consumers = {p for p, _, walk in self.walks() if _takes(walk, stream)}
        if len(producers) != 1:
            problem = f"is produced by partitions {', '.join(sorted(producers))}" if producers else "has no producer"
            self.declared.problem(
                f"stream {stream.name!r} {problem}", place, "exactly one partition puts values on a stream"
            )
        if not consumers:
            self.declared.problem(
                f"stream {stream.name!r} has no consumer",
                place,
                f"take {node.name}.{port} in a walk, in a Loop(over=) of this stream or by itself",
            )
        elif len(consumers) > 1:
            self.declared.problem(
                f"stream {stream.name!r} is taken by partitions {', '.join(sorted(consumers))}",
                place,
                "one partition takes a stream",
            )
        elif producers == consumers:
            self.declared.problem(
                f"stream {stream.name!r} stays inside partition {next(iter(producers))!r}",
                place,
                "use a GraphEdge, or put the consumer into a partition of its own",
            )

    def policy(self, stream: Stream, place: str) -> None:
        match stream.chunk:
            case FixedChunk(size=size):
                sizes, least = {"size": size}, {"size": 1}
            case SlidingWindow(window=window, stride=stride, first=first):
                sizes, least = {"window": window, "stride": stride}, {"window": 1, "stride": 1}
                self.first_chunk(stream, first, window, place, "the window's size")
            case LeftContext(chunk=chunk, left=left, first=first):
                sizes, least = {"chunk": chunk, "left": left}, {"chunk": 1, "left": 0}
                self.first_chunk(stream, first, chunk, place, "the size of later chunks")
        for param in bound_parameters(stream.chunk):
            self.declared.param(param, place, f"chunk policy of stream {stream.name!r}")
        for name, value in sizes.items():
            if value < least[name]:
                self.declared.problem(
                    f"chunk policy of stream {stream.name!r} has {name}={value}",
                    place,
                    f"{name} is at least {least[name]}",
                )

    def first_chunk(self, stream: Stream, first: int | None, most: int, place: str, what: str) -> None:
        if first is not None and not 1 <= first <= most:
            self.declared.problem(
                f"chunk policy of stream {stream.name!r} has first={first}",
                place,
                f"the first chunk holds 1 to {most} items, {what}",
            )


def bound_parameters(policy: ChunkPolicy) -> list[str]:
    """Return the parameters that a chunk policy takes numbers from."""
    match policy:
        case LeftContext(chunk_from=chunk, left_from=left, first_from=first):
            names = [chunk, left, first]
        case SlidingWindow(first_from=first):
            names = [first]
        case _:
            names = []
    return [name for name in names if name is not None]


def _streams_out(walk: Walk) -> set[str]:
    """Return the names of the streams that a walk puts values on."""
    return {edge.stream.name for edge in edges_of(walk) if isinstance(edge, StreamingGraphEdge)}


def _takes(walk: Walk, stream: Stream) -> bool:
    node, port = stream.into
    return any(use.spec.name == node.name and port in use.inputs for use in graph_nodes(walk))
