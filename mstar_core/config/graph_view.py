"""Graph of a served model with its placement, as watch frames contain it. Used by `up`, conductor and workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mstar_core.config.deployment import Plan
from mstar_core.graph import CompiledWalk, Kind, NodeSpec, Outlet, Stream, compile_graph
from mstar_core.graph.declare.streams import FixedChunk, LeftContext, SlidingWindow
from mstar_core.observe.frames import EdgeView, GraphView, NodeView, WalkView
from mstar_core.plugin.spec import ModelSpec

Route = tuple[str, str, str, str, bool, str]
"""(name, source, into, modality, is a stream, chunk policy): identity of an edge that several walks share."""


def graph_of(model: ModelSpec, plan: Plan | None = None) -> GraphView:
    """Return nodes, edges and walks of a model. plan: placement of the nodes; without one, nodes have no replicas."""
    walks = {name: walk for partition in model.partitions for name, walk in partition.walks.items()}
    compiled = compile_graph(walks, model.streams)
    routes: dict[Route, list[str]] = {}
    kinds = [modality.kind for modality in model.inputs]
    for name, walk in compiled.items():
        for route in _routes(walk, kinds):
            names = routes.setdefault(route, [])
            if name not in names:
                names.append(name)
    partition_of = {name: partition.name for partition in model.partitions for name in partition.walks}
    return GraphView(
        model=model.name,
        partitions=[partition.name for partition in model.partitions],
        nodes=[_node(node, compiled, partition_of, plan) for node in model.nodes],
        edges=[_edge(route, names) for route, names in routes.items()],
        walks=[
            WalkView(name=name, partition=partition_of[name], nodes=list(dict.fromkeys(t.name for t in walk.tasks)))
            for name, walk in compiled.items()
        ],
    )


def main_nodes(model: ModelSpec) -> dict[str, str]:
    """Return walk -> the node that is shown as a request's place in that walk: one with a cache, else the first."""
    cached = {node.name for node in model.nodes if node.kv is not None}
    return {
        walk.name: next((node for node in walk.nodes if node in cached), walk.nodes[0] if walk.nodes else "")
        for walk in graph_of(model).walks
    }


def stream_ends(graph: GraphView) -> dict[str, tuple[str, str]]:
    """Return stream -> (producing node, consuming node)."""
    return {edge.name: (edge.source, edge.into) for edge in graph.edges if edge.is_stream}


def input_kind(port: str, node: str, kinds: Collection[str]) -> str:
    """Return the modality of a walk's input, empty for an input that is computed from the request's parameters.

    port: name of the input. node: its consumer if that has no other input, else empty. kinds: input modalities of the
    model. Token ids are text. Other ports are named after their modality (`images`, `pixel_values_videos`), or are the
    only input of a node that is (`audio_encoder`). Positions, masks and noise have no modality.
    """
    if port.rpartition("_")[2] == "tokens" and "text" in kinds:
        return "text"
    words = {word.removesuffix("s") for word in port.split("_")}
    return next((kind for kind in kinds if kind in words or node.startswith(f"{kind}_")), "")


def chunk_text(stream: Stream) -> str:
    """Describe a chunk policy briefly for drawings: `fixed 1`, `25, left 25`, `28, stride 7`."""
    match stream.chunk:
        case FixedChunk(size=size):
            return f"fixed {size}"
        case LeftContext(chunk=chunk, left=left):
            return f"{chunk}, left {left}"
        case SlidingWindow(window=window, stride=stride):
            return f"{window}, stride {stride}"


def _edge(route: Route, walks: list[str]) -> EdgeView:
    name, source, into, modality, is_stream, chunk = route
    return EdgeView(
        name=name, source=source, into=into, modality=modality, is_stream=is_stream, chunk=chunk, walks=walks
    )


def _node(
    node: NodeSpec, compiled: dict[str, CompiledWalk], partition_of: dict[str, str], plan: Plan | None
) -> NodeView:
    walks = [name for name, walk in compiled.items() if any(task.name == node.name for task in walk.tasks)]
    looped = [name for name in walks if any(task.name == node.name and task.path for task in compiled[name].tasks)]
    home = node.of.name if node.of is not None else node.name
    placements = [] if plan is None else [p for p in plan.placements if p.node in (node.name, home)]
    replicas = list(dict.fromkeys(replica for placement in placements for replica in placement.replicas))
    return NodeView(
        name=node.name,
        engine=str(node.engine),
        partition=next((partition_of[name] for name in walks), ""),
        replicas=[list(replica) for replica in replicas],
        walks=walks,
        loops=looped,
    )


def _routes(walk: CompiledWalk, kinds: Collection[str]) -> Iterator[Route]:
    for task in walk.tasks:
        ports = [entry.source.port for entry in task.inputs if entry.source.kind is Kind.RUN]
        for port in ports:
            yield port, "", task.name, input_kind(port, task.name if len(ports) == 1 else "", kinds), False, ""
        for entry in task.inputs:
            for giver in sorted(walk.feeding(entry.source)):
                if walk.tasks[giver].name != task.name:
                    yield entry.source.port or entry.port, walk.tasks[giver].name, task.name, "", False, ""
        for outlet in task.outlets:
            yield from _leaving(task.name, outlet)
    for loop in walk.loops:
        for result in loop.results:
            for giver in sorted(walk.feeding(result.back)):
                for outlet in result.outlets:
                    yield from _leaving(walk.tasks[giver].name, outlet)


def _leaving(source: str, outlet: Outlet) -> Iterator[Route]:
    if outlet.modality is not None:
        yield outlet.port, source, "", outlet.modality, False, ""
    if outlet.stream is not None:
        stream: Stream = outlet.stream
        yield stream.name, source, stream.into[0].name, "", True, chunk_text(stream)
