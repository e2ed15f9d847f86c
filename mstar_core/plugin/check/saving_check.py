"""Check of loops that save their carried values: a new attempt that begins inside one must equal a whole run."""

from __future__ import annotations

from collections.abc import Iterator

from mstar_core.errors import GraphError
from mstar_core.graph import KV_CACHE, GraphNode, Loop, StreamingGraphEdge, Walk, graph_nodes, loops
from mstar_core.graph.declare.walks import edges_of
from mstar_core.plugin.surface import PROGRESS


def saving_problems(name: str, walk: Walk) -> Iterator[GraphError]:
    """Yield a problem for each loop of a walk that saves and cannot begin at a later iteration."""
    inner = [each for loop in loops(walk) for each in loops(loop.body)]
    for loop in loops(walk):
        reason = _obstacle(loop, is_inner=loop in inner) if loop.save_every else ""
        if reason:
            yield GraphError(
                f"walk {name!r} saves loop {loop.name!r}, which {reason}",
                hint="leave save_every= out: the loop then begins anew after a death",
                place=f"{name}.{loop.name}",
            )


def _obstacle(loop: Loop, *, is_inner: bool) -> str:
    """Return why the carried values of a loop are not all that its later iterations depend on, empty if they are."""
    if is_inner:
        return "is inside another loop"
    if not loop.carry:
        return "carries nothing"
    if loop.over is not None or loop.stop is not None:
        return "has a stream or a stop rule"
    if isinstance(loop.body, GraphNode):
        return "the engine runs as one job"
    for use in graph_nodes(loop.body):
        if use.spec.engine is KV_CACHE and (use.attend is None or use.attend.write):
            return f"writes the cache of {use.spec.name!r}"
        if use.spec.sampling is not None and any(edge.port == use.spec.sampling.port for edge in use.outputs):
            return f"draws ids in {use.spec.name!r}"
    for edge in edges_of(loop.body):
        if isinstance(edge, StreamingGraphEdge):
            return f"puts {edge.port!r} on a stream"
        if edge.is_client and edge.modality != PROGRESS:
            return f"emits {edge.port!r} in each iteration"
    return ""
