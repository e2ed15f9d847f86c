"""Ports of resident loops with one value per sequence: carried state, inputs that stay, stream items, random numbers.

Derived from the walks when a model is loaded; the engine of a KV node makes one row per slot for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mstar_core.graph.compile.compiled import CompiledWalk
from mstar_core.graph.declare.nodes import KV_CACHE, PARAM_PREFIX, RANDOM, Attend, NodeSpec, PortType, keyword
from mstar_core.graph.declare.streams import FixedChunk, Stream
from mstar_core.graph.declare.walks import GraphNode, Loop


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPorts:
    """Ports of a resident loop beside its sampled id, all with one value per sequence.

    id_port: input that takes the sampled id. states: (input, output that replaces its value after an iteration).
    constants: inputs whose value stays, as the walk names them. feed: input that takes an item of a stream per
    iteration, or None. random: whether the node takes RANDOM.
    """

    id_port: str
    states: tuple[tuple[str, str], ...] = ()
    constants: tuple[str, ...] = ()
    feed: str | None = None
    random: bool = False


def loop_ports(loop: Loop, use: GraphNode) -> LoopPorts | None:
    """Return the ports of a loop around one node if its engine can keep one value per sequence for each.

    None if the loop carries only its sampled id, or if it does not fit: the node samples and carries its id, the stop
    rule is about that id, tokens are causal and appended at running positions, and every other input has a fixed
    shape. A stream hands over one id per iteration.
    """
    spec = use.spec
    if spec.engine is not KV_CACHE or spec.sampling is None or spec.of is not None:
        return None
    port = spec.sampling.port
    if port not in loop.carry or use.attend not in (None, Attend(), Attend(tokens=1)):
        return None
    if loop.stop is not None and loop.stop.port != port:
        return None
    backs = {into: out for out, into in loop.carry.items()}
    states, constants, feed = [], [], None
    for name in use.inputs:
        if name == loop.carry[port] or name == RANDOM:
            continue
        if loop.over is not None and (loop.over.into[0].name, loop.over.into[1]) == (spec.name, name):
            feed = name
        elif name in backs:
            states.append((name, backs[name]))
        elif name.startswith("$") and not name.startswith(PARAM_PREFIX):
            return None
        else:
            constants.append(name)
    random = RANDOM in use.inputs
    if not (states or constants or feed or random) or (loop.over is not None and not _is_feed(loop.over)):
        return None
    fixed = [*map(keyword, constants), *(name for pair in states for name in pair), *([keyword(RANDOM)] * random)]
    if not all(is_fixed(spec, name) for name in fixed) or len(states) + 1 != len(loop.carry):
        return None
    return LoopPorts(
        id_port=loop.carry[port], states=tuple(states), constants=tuple(constants), feed=feed, random=random
    )


def is_fixed(spec: NodeSpec, name: str) -> bool:
    """Return whether a node declares a port and every dimension of its values as a number."""
    if name not in spec.ports:
        return False
    kind = spec.port(name)
    return all(isinstance(size, int) for size in kind.shape) and (bool(kind.shape) or kind.dtype != "any")


def resident_ports(walks: Iterable[CompiledWalk]) -> dict[str, LoopPorts]:
    """Return the ports by node. A node whose loops differ in them has none: its decode batch has one form."""
    uses: dict[str, set[LoopPorts]] = {}
    for walk in walks:
        for loop in walk.loops:
            use = walk.tasks[loop.tasks[0]].node if len(loop.tasks) == 1 and not loop.loops else None
            ports = None if use is None else loop_ports(loop.loop, use)
            if ports is not None and use is not None:
                uses.setdefault(use.spec.name, set()).add(ports)
    return {node: next(iter(ports)) for node, ports in uses.items() if len(ports) == 1}


def _is_feed(stream: Stream) -> bool:
    """Whether a stream hands over one id at a time."""
    node, port = stream.into
    kind = node.port(port) if port in node.ports else PortType(dtype="any")
    return (
        isinstance(stream.chunk, FixedChunk) and stream.chunk.size == 1 and kind.dtype == "i64" and kind.shape == (1,)
    )
