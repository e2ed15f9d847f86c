"""The OpenAPI document of the admin socket, made from the table of endpoints and the frames' types."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

import msgspec

from mstar_core.admin.endpoints import ENDPOINTS, Endpoint, Parameter
from mstar_core.observe.frames import ITEM_TYPES, DeltaFrame, DeploymentStatus, GraphView, HelloFrame, SnapshotFrame
from mstar_core.version import __version__

PROBLEM: Final = {
    "type": "object",
    "description": "What went wrong, why with numbers, and what to try.",
    "properties": {name: {"type": "string"} for name in ("code", "title", "detail", "hint")},
    "required": ["code", "title", "detail", "hint"],
}


def document() -> dict[str, Any]:
    """The whole document."""
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
        "parameters": [_in_path(endpoint)] * ("{id}" in endpoint.path) + [_in_query(p) for p in endpoint.parameters],
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
        doc = "The same key again does nothing and is answered as before."
        key = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}, "description": doc}
        operation["parameters"].append(key)
    return operation


def _in_path(endpoint: Endpoint) -> dict[str, Any]:
    what = "a request" if "requests" in endpoint.path else "a recording"
    return {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "description": f"id of {what}"}


def _in_query(parameter: Parameter) -> dict[str, Any]:
    return {"name": parameter.name, "in": "query", "schema": {"type": parameter.kind}, "description": parameter.doc}
