"""JSON form of nodes, streams and walks, which can be read back. Nodes and streams are referenced by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from mstar_core.errors import GraphError, did_you_mean
from mstar_core.graph.spec.edges import Edge, GraphEdge, StreamingGraphEdge
from mstar_core.graph.spec.nodes import CLIENT, Attend, EngineKind, KVSpec, NodeSpec, Sampling
from mstar_core.graph.spec.streams import ChunkPolicy, FixedChunk, LeftContext, SlidingWindow, Stream
from mstar_core.graph.spec.walks import GraphNode, Loop, Parallel, Sequential, StopOn, StopWhen, Walk

Json = dict[str, Any]
_CHUNKS: dict[str, type[ChunkPolicy]] = {"fixed": FixedChunk, "window": SlidingWindow, "left": LeftContext}
_CHUNK_KINDS = {kind: name for name, kind in _CHUNKS.items()}


def node_to_json(node: NodeSpec) -> Json:
    """Return the form of a node. `of` is the name of the node with the same weights."""
    fields: Json = {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}
    fields["engine"] = str(node.engine)
    fields["ports"] = dict(node.ports)
    fields["kv"] = None if node.kv is None else {**dataclasses.asdict(node.kv), "branches": list(node.kv.branches)}
    fields["sampling"] = None if node.sampling is None else _sampling_to_json(node.sampling)
    fields["of"] = None if node.of is None else node.of.name
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def node_from_json(data: Mapping[str, Any], nodes: Mapping[str, NodeSpec]) -> NodeSpec:
    """Return the node of a form. nodes: those before it, by name."""
    kv, sampling = data["kv"], data["sampling"]
    made: Json = {
        **{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()},
        "engine": EngineKind(data["engine"]),
        "ports": dict(data["ports"]),
        "kv": None if kv is None else KVSpec(**{**kv, "branches": tuple(kv["branches"])}),
        "sampling": None if sampling is None else _sampling_from_json(sampling),
        "of": None if data["of"] is None else _named(data["of"], nodes, "node"),
    }
    return NodeSpec(**made)


_RANGES: Final = ("suppress", "vocabulary")
"""Fields of Sampling that hold ranges of ids."""


def _sampling_to_json(sampling: Sampling) -> Json:
    fields: Json = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
    return fields | {name: [range_to_json(item) for item in fields[name]] for name in _RANGES}


def _sampling_from_json(data: Mapping[str, Any]) -> Sampling:
    return Sampling(**{**data, **{name: tuple(map(range_from_json, data[name])) for name in _RANGES}})


def range_to_json(ids: range) -> list[int]:
    return [ids.start, ids.stop, ids.step]


def range_from_json(data: list[int]) -> range:
    return range(*data)


def stream_to_json(stream: Stream) -> Json:
    """Return the form of a stream. `into` is [node name, port]."""
    return {
        "name": stream.name,
        "into": [stream.into[0].name, stream.into[1]],
        "chunk": {"policy": _CHUNK_KINDS[type(stream.chunk)], **dataclasses.asdict(stream.chunk)},
        "accept": None if stream.accept is None else range_to_json(stream.accept),
        "flush_if": stream.flush_if,
    }


def stream_from_json(data: Mapping[str, Any], nodes: Mapping[str, NodeSpec]) -> Stream:
    """Return the stream of a form."""
    chunk = dict(data["chunk"])
    policy = _CHUNKS[chunk.pop("policy")]
    return Stream(
        name=data["name"],
        into=(_named(data["into"][0], nodes, "node"), data["into"][1]),
        chunk=policy(**chunk),
        accept=None if data["accept"] is None else range_from_json(data["accept"]),
        flush_if=data["flush_if"],
    )


def edge_to_json(edge: Edge) -> Json:
    """Return the form of an edge."""
    if isinstance(edge, StreamingGraphEdge):
        return {"port": edge.port, "stream": edge.stream.name}
    to = edge.to.name if isinstance(edge.to, NodeSpec) else edge.to
    return {"port": edge.port, "to": to, "into": edge.into, "modality": edge.modality}


def edge_from_json(data: Mapping[str, Any], nodes: Mapping[str, NodeSpec], streams: Mapping[str, Stream]) -> Edge:
    """Return the edge of a form."""
    if "stream" in data:
        return StreamingGraphEdge(data["port"], _named(data["stream"], streams, "stream"))
    to = CLIENT if data["to"] == CLIENT else _named(data["to"], nodes, "node")
    return GraphEdge(data["port"], to, into=data["into"], modality=data["modality"])


def walk_to_json(walk: Walk) -> Json:
    """Return the form of a walk: a tree of {"kind": node|sequential|parallel|loop}."""
    match walk:
        case GraphNode():
            attend = None if walk.attend is None else dataclasses.asdict(walk.attend)
            outputs = [edge_to_json(edge) for edge in walk.outputs]
            return {
                "kind": "node",
                "node": walk.spec.name,
                "inputs": list(walk.inputs),
                "outputs": outputs,
                "attend": attend,
            }
        case Sequential(parts=parts):
            return {"kind": "sequential", "parts": [walk_to_json(part) for part in parts]}
        case Parallel(parts=parts):
            return {"kind": "parallel", "parts": [walk_to_json(part) for part in parts]}
        case Loop():
            return {
                "kind": "loop",
                "name": walk.name,
                "body": walk_to_json(walk.body),
                "carry": dict(walk.carry),
                "over": None if walk.over is None else walk.over.name,
                "stop": _stop_to_json(walk.stop),
                "fused": walk.fused,
                "outputs": [edge_to_json(edge) for edge in walk.outputs],
            }


def walk_from_json(data: Mapping[str, Any], nodes: Mapping[str, NodeSpec], streams: Mapping[str, Stream]) -> Walk:
    """Return the walk of a form."""
    match data["kind"]:
        case "node":
            attend = None if data["attend"] is None else Attend(**data["attend"])
            outputs = tuple(edge_from_json(edge, nodes, streams) for edge in data["outputs"])
            return GraphNode(_named(data["node"], nodes, "node"), tuple(data["inputs"]), outputs, attend=attend)
        case "sequential":
            return Sequential(*(walk_from_json(part, nodes, streams) for part in data["parts"]))
        case "parallel":
            return Parallel(*(walk_from_json(part, nodes, streams) for part in data["parts"]))
        case "loop":
            return Loop(
                data["name"],
                walk_from_json(data["body"], nodes, streams),
                carry=dict(data["carry"]),
                over=None if data["over"] is None else _named(data["over"], streams, "stream"),
                stop=_stop_from_json(data["stop"]),
                fused=data["fused"],
                outputs=tuple(edge_from_json(edge, nodes, streams) for edge in data["outputs"]),
            )
        case kind:
            raise GraphError(f"walk element of kind {kind!r} is unknown", hint="node, sequential, parallel or loop")


def _stop_to_json(stop: StopOn | StopWhen | None) -> Json | None:
    match stop:
        case None:
            return None
        case StopOn():
            return {"kind": "on", "port": stop.port, "ids": list(stop.ids), "unless": stop.unless}
        case StopWhen():
            return {"kind": "when", "port": stop.port}


def _stop_from_json(data: Mapping[str, Any] | None) -> StopOn | StopWhen | None:
    if data is None:
        return None
    if data["kind"] == "when":
        return StopWhen(data["port"])
    return StopOn(data["port"], tuple(data["ids"]), unless=data["unless"])


def _named(name: str, known: Mapping[str, Any], kind: str) -> Any:
    if name not in known:
        raise GraphError(f"the JSON form names {kind} {name!r}", hint=did_you_mean(name, known), place=name)
    return known[name]
