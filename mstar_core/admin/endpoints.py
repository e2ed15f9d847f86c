"""Every endpoint of the admin socket, once: the server's routes, the OpenAPI document and the docs are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Parameter:
    """One word behind the question mark. kind: a JSON schema type."""

    name: str
    doc: str
    kind: str = "string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """name: of its handler. path: with `{id}` for a part that varies. lines: an NDJSON stream. body: fields of JSON."""

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
_PARTS = Parameter("parts", "ranks, nodes, requests, edges, gpus, children, graph, events, with commas; all without")
_FOLLOW = Parameter("follow", "1: go on with what comes", "integer")
_HANDLE = Parameter("handle", "the internal handle, where several requests had that id", "integer")

ENDPOINTS: Final = (
    Endpoint(name="head", method="GET", path="/v1/", doc="Versions, features, the deployment's head, boot, cause."),
    Endpoint(name="snapshot", method="GET", path="/v1/snapshot", doc="One consistent view with its revision.",
             parameters=(_PARTS, _FILTER), errors=(400,)),
    Endpoint(name="watch", method="GET", path="/v1/watch", doc="Frames: hello, a snapshot, then what changes.",
             parameters=(Parameter("hz", "frames a second, 0.1 to 10, default 4", "number"), _PARTS, _FILTER),
             errors=(400, 503), lines=True),
    Endpoint(name="requests", method="GET", path="/v1/requests",
             doc="Requests in flight and the last 2000 that ended; at most 1000 rows, the rest counted in `truncated`.",
             parameters=(_FILTER, Parameter("sort", "a field, `-` before it for falling order; default: newest first"),
                         Parameter("limit", "rows, at most 1000, default 100", "integer"),
                         Parameter("since", "only those that began within so many seconds", "number")),
             errors=(400,)),
    Endpoint(name="request", method="GET", path="/v1/requests/{id}", doc="The newest request with that client id.",
             parameters=(_HANDLE,), errors=(404,)),
    Endpoint(name="trace", method="GET", path="/v1/requests/{id}/trace",
             doc="Where its time went: spans by process, node and walk, and sums over all of them.",
             parameters=(_HANDLE,), errors=(404,)),
    Endpoint(name="cancel", method="POST", path="/v1/requests/{id}/cancel", doc="End a request and free its pages.",
             parameters=(_HANDLE,), status=202, errors=(404, 409)),
    Endpoint(name="graph", method="GET", path="/v1/graph", doc="The model's graph with its placement."),
    Endpoint(name="config", method="GET", path="/v1/config",
             doc="The resolved configuration; the file and line, flag or default that each value is from."),
    Endpoint(name="children", method="GET", path="/v1/children", doc="Every process with its start-up phase."),
    Endpoint(name="logs", method="GET", path="/v1/logs", doc="Lines of the processes' logs: `{from, line}`.",
             parameters=(_FOLLOW, Parameter("from", "a process, such as supervisor, api or worker-1; all without"),
                         Parameter("since", "only lines of the last so many seconds", "number"),
                         Parameter("tail", "lines from the past, per process, at most 200, default 100", "integer")),
             errors=(404,), lines=True),
    Endpoint(name="events", method="GET", path="/v1/events", doc="The life-cycle feed, the last 2000.",
             parameters=(_FOLLOW, Parameter("since", "only events with a higher number", "integer"),
                         Parameter("type", "a glob, such as child.*")), lines=True),
    Endpoint(name="metrics", method="GET", path="/v1/metrics", doc="Prometheus text.", media="text/plain"),
    Endpoint(name="health", method="GET", path="/v1/health",
             doc="200 while the deployment is starting or serving, 503 once it failed or is unhealthy.", errors=(503,)),
    Endpoint(name="ready", method="GET", path="/v1/ready", doc="200 when requests are taken, else 503.", errors=(503,)),
    Endpoint(name="clock", method="GET", path="/v1/clock", doc="The deployment's clock and the wall's, read together."),
    Endpoint(name="openapi", method="GET", path="/v1/openapi.json", doc="The schema of all of this."),
    Endpoint(name="drain", method="POST", path="/v1/deployment/drain", doc="Take no new requests.", status=202,
             errors=(409,)),
    Endpoint(name="resume", method="POST", path="/v1/deployment/resume", doc="Take requests again.", status=202,
             errors=(409,)),
    Endpoint(name="restart", method="POST", path="/v1/deployment/restart", doc="Drain, then start every process anew.",
             status=202, errors=(409, 503)),
    Endpoint(name="stop", method="POST", path="/v1/deployment/stop", doc="Drain, then end.", status=202,
             parameters=(Parameter("now", "1: do not wait for requests in flight", "integer"),
                         Parameter("grace", "most seconds of the drain", "integer")), errors=(409,)),
    Endpoint(name="log_level", method="POST", path="/v1/log-level", doc="Set a log level until the next start.",
             body=(Parameter("level", "DEBUG, INFO, WARNING or ERROR"),
                   Parameter("children", "names of processes; all without", "array")), status=202, errors=(400, 404)),
    Endpoint(name="recordings", method="GET", path="/v1/recordings", doc="Every recording that is kept."),
    Endpoint(name="record", method="POST", path="/v1/recordings",
             doc="Begin to write the trace of each request that ends into a file of at most 1 GiB.",
             body=(Parameter("name", "what it is for"), Parameter("max_bytes", "a smaller limit", "integer")),
             status=201, errors=(400, 409)),
    Endpoint(name="recording", method="GET", path="/v1/recordings/{id}", doc="Its state; its lines with `lines=1`.",
             parameters=(Parameter("lines", "1: the traces, one a line", "integer"),), errors=(404,)),
    Endpoint(name="progress", method="POST", path="/v1/recordings/{id}/progress",
             doc="What the load test has to say of itself; shown with the recording. Any object of at most 64 KiB.",
             status=202, errors=(404,)),
    Endpoint(name="erase", method="DELETE", path="/v1/recordings/{id}", doc="End a recording and remove its file.",
             errors=(404,)),
)  # fmt: skip
