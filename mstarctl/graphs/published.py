"""Published JSON form of a graph: nodes, streams and walks without the fields that are not set."""

from __future__ import annotations

from mstar_core.graph import CLIENT, NodeSpec, Stream
from mstar_core.plugin.json_form import Json, form_of
from mstarctl.graphs.graph import Graph


def graph_to_dict(graph: Graph) -> Json:
    """Return the published form: nodes, streams and partitions with their walks, without fields that are not set."""
    return {
        "name": graph.name,
        "nodes": [_published_node(node) for node in graph.nodes],
        "streams": [_published_stream(graph, stream) for stream in graph.streams],
        "partitions": [
            {"name": name, "walks": {walk: _published_walk(form_of(part)) for walk, part in walks.items()}}
            for name, walks in graph.partitions.items()
        ],
    }


def _published_node(node: NodeSpec) -> Json:
    full = form_of(node)
    shown = ("name", "engine", "ports", *(("of", "branch") if node.of is not None else ()))
    fields = {name: full[name] for name in shown}
    if node.sampling is not None:
        fields["samples"] = node.sampling.port
    fields |= {name: full[name] for name in ("kv", "tensor_parallel", "doc") if full[name]}
    return fields


def _published_stream(graph: Graph, stream: Stream) -> Json:
    full = form_of(stream)
    node, port = full["into"]
    fields: Json = {
        "name": stream.name,
        "into": {"node": node, "port": port, "partition": graph.consumer(stream)},
        "chunk": {**full["chunk"], "policy": type(stream.chunk).__name__},
    }
    if stream.accept is not None:
        fields["accept"] = [stream.accept.start, stream.accept.stop]
    if stream.reject:
        fields["reject"] = list(stream.reject)
    return fields if stream.flush_if is None else {**fields, "flush_if": stream.flush_if}


def _published_walk(form: Json) -> Json:
    fields = {name: value for name, value in form.items() if value is not None}
    if "outputs" in fields:
        fields["outputs"] = [_published_edge(edge) for edge in fields["outputs"]]
    if "body" in fields:
        fields["body"] = _published_walk(fields["body"])
    if "parts" in fields:
        fields["parts"] = [_published_walk(part) for part in fields["parts"]]
    if "stop" in fields:
        fields["stop"] = {name: value for name, value in fields["stop"].items() if name != "kind"}
    return fields


def _published_edge(form: Json) -> Json:
    if "stream" in form:
        return form
    if form["to"] == CLIENT:
        return {name: form[name] for name in ("port", "to", "modality")}
    return {"port": form["port"], "to": form["to"], "into": form["into"] or form["port"]}
