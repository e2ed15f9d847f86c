"""Table of the admin socket's endpoints, source of the server's routes, the OpenAPI document and the docs."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec

from mstar_core.observe.frames import ITEM_TYPES, DeltaFrame, DeploymentStatus, GraphView, HelloFrame, SnapshotFrame
from mstar_core.version import __version__


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter, or a field of a JSON body. kind: a JSON schema type."""

    name: str
    doc: str
    kind: str = "string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint. name: of its handler. path: may contain `{id}`. body: fields of JSON. lines: an NDJSON stream."""

    name: str
    method: str
    path: str
    doc: str
    parameters: tuple[Parameter, ...] = ()
    body: tuple[Parameter, ...] = ()
    status: int = 200
    errors: tuple[int, ...] = ()
    lines: bool = False
    media: str = "application/json"


_FILTER = Parameter("filter", "requests to show, such as `state:queue ttft>500`; no regular expressions")
_PARTS = Parameter(
    "parts", "ranks, nodes, requests, edges, gpus, children, hosts, graph, events, comma-separated; default: all"
)
_FOLLOW = Parameter("follow", "1: continue with new ones", "integer")
_HANDLE = Parameter("handle", "the internal handle, if several requests had that id", "integer")

ENDPOINTS: Final = (
    Endpoint(name="head", method="GET", path="/v1/", doc="Versions, features, boot, head and last failure."),
    Endpoint(
        name="snapshot",
        method="GET",
        path="/v1/snapshot",
        doc="One consistent snapshot with its revision.",
        parameters=(_PARTS, _FILTER),
        errors=(400,),
    ),
    Endpoint(
        name="watch",
        method="GET",
        path="/v1/watch",
        doc="Frames: hello, a snapshot, then changes.",
        parameters=(Parameter("hz", "frames per second, 0.1 to 10, default 4", "number"), _PARTS, _FILTER),
        errors=(400, 503),
        lines=True,
    ),
    Endpoint(
        name="requests",
        method="GET",
        path="/v1/requests",
        doc="Requests in flight and the last 2000 that ended; at most 1000 rows, the rest counted in `truncated`.",
        parameters=(
            _FILTER,
            Parameter("sort", "a field, `-` before it: descending; default: newest first"),
            Parameter("limit", "rows, at most 1000, default 100", "integer"),
            Parameter("since", "only requests that began within so many seconds", "number"),
        ),
        errors=(400,),
    ),
    Endpoint(
        name="request",
        method="GET",
        path="/v1/requests/{id}",
        doc="The newest request with that client id.",
        parameters=(_HANDLE,),
        errors=(404,),
    ),
    Endpoint(
        name="trace",
        method="GET",
        path="/v1/requests/{id}/trace",
        doc="Its spans by process, node and walk, and sums over all spans.",
        parameters=(_HANDLE,),
        errors=(404,),
    ),
    Endpoint(
        name="cancel",
        method="POST",
        path="/v1/requests/{id}/cancel",
        doc="Cancel a request and free its pages.",
        parameters=(_HANDLE,),
        status=202,
        errors=(404, 409),
    ),
    Endpoint(name="graph", method="GET", path="/v1/graph", doc="The model's graph with its placement."),
    Endpoint(
        name="config",
        method="GET",
        path="/v1/config",
        doc="The resolved configuration, with the file and line, flag or default of each value.",
    ),
    Endpoint(name="children", method="GET", path="/v1/children", doc="Every process with its start-up phase."),
    Endpoint(
        name="logs",
        method="GET",
        path="/v1/logs",
        doc="Lines of the processes' logs: `{from, line}`.",
        parameters=(
            _FOLLOW,
            Parameter("from", "a process, such as supervisor, api or worker-1; default: all"),
            Parameter("since", "only lines of the last so many seconds", "number"),
            Parameter("tail", "past lines per process, at most 200, default 100", "integer"),
        ),
        errors=(404,),
        lines=True,
    ),
    Endpoint(
        name="events",
        method="GET",
        path="/v1/events",
        doc="Life-cycle events, the last 2000.",
        parameters=(
            _FOLLOW,
            Parameter("since", "only events with a higher number", "integer"),
            Parameter("type", "a glob, such as child.*"),
        ),
        lines=True,
    ),
    Endpoint(name="metrics", method="GET", path="/v1/metrics", doc="Prometheus text format.", media="text/plain"),
    Endpoint(
        name="health",
        method="GET",
        path="/v1/health",
        doc="200 while the deployment is starting or serving, 503 if it failed or is unhealthy.",
        errors=(503,),
    ),
    Endpoint(name="ready", method="GET", path="/v1/ready", doc="200 if requests are accepted.", errors=(503,)),
    Endpoint(name="clock", method="GET", path="/v1/clock", doc="The monotonic and the wall clock, read together."),
    Endpoint(name="openapi", method="GET", path="/v1/openapi.json", doc="The OpenAPI document of this socket."),
    Endpoint(
        name="drain", method="POST", path="/v1/deployment/drain", doc="Refuse new requests.", status=202, errors=(409,)
    ),
    Endpoint(
        name="resume",
        method="POST",
        path="/v1/deployment/resume",
        doc="Accept requests again.",
        status=202,
        errors=(409,),
    ),
    Endpoint(
        name="reload",
        method="POST",
        path="/v1/deployment/reload",
        status=202,
        errors=(400, 409),
        doc="Read the files of API keys and of the certificate again. Returns how many keys there are now.",
    ),
    Endpoint(
        name="restart",
        method="POST",
        path="/v1/deployment/restart",
        doc="Drain, then restart every process; with `rolling`, restart one after the other and serve meanwhile.",
        parameters=(Parameter("rolling", "1: one process or tensor-parallel group after the other", "integer"),),
        status=202,
        errors=(409, 503),
    ),
    Endpoint(
        name="set",
        method="POST",
        path="/v1/config",
        doc="Change keys that can change while the deployment runs. Returns the new and the old values.",
        body=(Parameter("values", 'value by key, such as {"max_queue": 64}', "object"),),
        status=202,
        errors=(400,),
    ),
    Endpoint(
        name="scale",
        method="POST",
        path="/v1/deployment/scale",
        doc="Add or remove replicas of every node while the deployment serves.",
        body=(
            Parameter("replicas", "replicas of every node", "integer"),
            Parameter("free", "GPUs for new ranks: objects with `name`, `key` of its lock, `free_bytes`", "array"),
        ),
        status=202,
        errors=(400, 409, 503),
    ),
    Endpoint(
        name="sleep",
        method="POST",
        path="/v1/deployment/sleep",
        doc="Give the memory of the devices back; the processes live on. 409 names the requests that run.",
        body=(
            Parameter("level", "1 (default): keep the weights in host memory; 2: drop them", "integer"),
            Parameter("nodes", "nodes that sleep; default: all", "array"),
            Parameter("wait", "1: wait for requests in flight, at most the drain limit; new ones wait", "integer"),
        ),
        status=202,
        errors=(400, 404, 409, 503),
    ),
    Endpoint(
        name="wake",
        method="POST",
        path="/v1/deployment/wake",
        doc="Take the memory of the devices again, and serve.",
        body=(Parameter("nodes", "nodes that wake; default: all", "array"),),
        status=202,
        errors=(400, 404, 409),
    ),
    Endpoint(name="adapters", method="GET", path="/v1/adapters", doc="LoRA adapters that are loaded, and the room."),
    Endpoint(
        name="load_adapter",
        method="POST",
        path="/v1/adapters",
        doc="Load a LoRA adapter on every rank while the deployment serves.",
        body=(
            Parameter("name", "the model name by which requests choose it"),
            Parameter("folder", "absolute path on every host: adapter_config.json and adapter_model.safetensors"),
            Parameter("rank", "its rank, for display", "integer"),
            Parameter("base", "name of its base model, for display"),
        ),
        status=202,
        errors=(400, 409, 503),
    ),
    Endpoint(
        name="unload_adapter",
        method="DELETE",
        path="/v1/adapters/{id}",
        doc="Accept no more requests for a LoRA adapter, and unload it when those in flight have ended.",
        status=202,
        errors=(404, 409, 503),
    ),
    Endpoint(
        name="cordon",
        method="POST",
        path="/v1/ranks/{id}/cordon",
        doc="Send a rank no new requests; those that it has finish within the drain limit.",
        status=202,
        errors=(404, 409),
    ),
    Endpoint(
        name="uncordon",
        method="POST",
        path="/v1/ranks/{id}/uncordon",
        doc="Send a rank new requests again.",
        status=202,
        errors=(404,),
    ),
    Endpoint(
        name="stop",
        method="POST",
        path="/v1/deployment/stop",
        doc="Drain, then end.",
        status=202,
        parameters=(
            Parameter("now", "1: do not wait for requests in flight", "integer"),
            Parameter("grace", "limit of the drain in seconds", "integer"),
        ),
        errors=(409,),
    ),
    Endpoint(
        name="log_level",
        method="POST",
        path="/v1/log-level",
        doc="Set the log level until the next start.",
        body=(
            Parameter("level", "DEBUG, INFO, WARNING or ERROR"),
            Parameter("children", "names of processes; default: all", "array"),
        ),
        status=202,
        errors=(400, 404),
    ),
    Endpoint(name="recordings", method="GET", path="/v1/recordings", doc="All recordings."),
    Endpoint(
        name="record",
        method="POST",
        path="/v1/recordings",
        doc="Start to write the trace of each request that ends to a file of at most 1 GiB.",
        body=(Parameter("name", "its purpose"), Parameter("max_bytes", "a smaller limit", "integer")),
        status=201,
        errors=(400, 409),
    ),
    Endpoint(
        name="recording",
        method="GET",
        path="/v1/recordings/{id}",
        doc="Its state, or its lines with `lines=1`.",
        parameters=(Parameter("lines", "1: the traces, one per line", "integer"),),
        errors=(404,),
    ),
    Endpoint(
        name="progress",
        method="POST",
        path="/v1/recordings/{id}/progress",
        doc="Store the progress of the load test, shown with the recording. Any JSON object of at most 64 KiB.",
        status=202,
        errors=(404,),
    ),
    Endpoint(
        name="erase",
        method="DELETE",
        path="/v1/recordings/{id}",
        doc="Stop a recording and delete its file.",
        errors=(404,),
    ),
)

PROBLEM: Final = {
    "type": "object",
    "description": "An error: title, detail with numbers, and a hint what to try.",
    "properties": {name: {"type": "string"} for name in ("code", "title", "detail", "hint")},
    "required": ["code", "title", "detail", "hint"],
}


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    types = [*ITEM_TYPES.values(), DeploymentStatus, GraphView, HelloFrame, SnapshotFrame, DeltaFrame]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mstarctl admin socket", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**dict(sorted(schemas.items())), "Problem": PROBLEM}},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    media = "application/x-ndjson" if endpoint.lines else endpoint.media
    operation: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.doc,
        "parameters": [*_in_path(endpoint), *map(_in_query, endpoint.parameters)],
        "responses": {
            str(endpoint.status): {"description": HTTPStatus(endpoint.status).phrase, "content": {media: {}}},
            **{
                str(status): {
                    "description": HTTPStatus(status).phrase,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
                }
                for status in (*endpoint.errors, 403)
            },
        },
    }
    if endpoint.body:
        fields = {p.name: {"type": p.kind, "description": p.doc} for p in endpoint.body}
        schema = {"type": "object", "properties": fields}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    if endpoint.method == "POST":
        doc = "A repeated key has no effect and returns the first answer."
        key = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}, "description": doc}
        operation["parameters"].append(key)
    return operation


_NAMED: Final = {"adapters": "an adapter", "requests": "a request", "recordings": "a recording", "ranks": "a rank"}


def _in_path(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Return the parameter of a path with `{id}`; none for another."""
    named = [what for part, what in _NAMED.items() if f"/{part}/{{id}}" in endpoint.path]
    return [
        {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "description": f"id of {what}"}
        for what in named
    ]


def _in_query(parameter: Parameter) -> dict[str, Any]:
    return {"name": parameter.name, "in": "query", "schema": {"type": parameter.kind}, "description": parameter.doc}
