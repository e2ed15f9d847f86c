"""OpenAPI 3.1 description of a deployment, generated from the request and response types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from mstar_core.api.parse.params import MAX_STOP_CHARS, MAX_STOPS, MIN_PERIOD_MS, NO_EFFECT, SILENT
from mstar_core.api.requests.registry import MAX_SEED
from mstar_core.api.route_table import EVENTS, FORM, JSON, URLENCODED, HttpRoute, shown_path
from mstar_core.api.schema import ErrorBody, GenerateRequest
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.plugin.params import CommonParams, param_schema
from mstar_core.plugin.spec import ModelSpec

Json = dict[str, Any]

REF: Final = "#/components/schemas/{name}"
STOP: Final = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
COMMON: Final[Mapping[str, Json]] = {
    "seed": {
        "type": "integer",
        "minimum": 0,
        "maximum": MAX_SEED,
        "description": "the same seed gives the same output",
    },
    **{
        name: {key: value for key, value in schema.items() if key != "default"}  # each model has its own
        for name, schema in param_schema(CommonParams)["properties"].items()
    },
    "stop": {
        "anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOPS}],
        "description": "strings that end the text; they are not part of the output",
    },
    "timeout_s": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "seconds to the deadline, including time in the queue",
    },
    "period_ms": {
        "type": "number",
        "minimum": MIN_PERIOD_MS,
        "description": "milliseconds between ticks of the client's control loop; the answer is due within them",
    },
    "skipped_ticks": {
        "type": "integer",
        "minimum": 0,
        "description": "ticks of the control loop without a request since the client's previous one",
    },
    "priority": {"type": "number", "description": "accepted"},
}
"""Parameters that every model accepts; unused ones give a warning."""

PATH_PARAMETER: Final = re.compile(r"\{(\w+)\}")

ID_HEADER: Final = ("X-Request-ID", {"type": "string", "pattern": "^[!-.0-~]{1,128}$"}, "the client's own id")
HEADERS: Final = (
    ID_HEADER,
    ("X-Request-Timeout", {"type": "number", "exclusiveMinimum": 0}, "seconds to the deadline"),
    ("X-Mstar-Detach", {"type": "boolean"}, "whether a streamed request goes on when its connection is closed"),
    (
        "X-Mstar-Cache-Scope",
        {"type": "string"},
        "requests share cached prefixes and media only with those of the same scope; a gateway sets it for each tenant",
    ),
    ("X-Period-Ms", {"type": "number", "minimum": MIN_PERIOD_MS}, "as `period_ms`"),
    ("X-Skipped-Ticks", {"type": "integer", "minimum": 0}, "as `skipped_ticks`"),
)


def describe(deployment: DeploymentSpec, spec: ModelSpec, routes: Sequence[HttpRoute]) -> Json:
    """Return the description of a deployment. routes: those that it serves; WebSockets and the web page are omitted."""
    routes = [route for route in routes if not route.is_socket and not route.is_hidden]
    names = components(routes)
    schemas = {**names}
    parameters = {**COMMON, **param_schema(spec.params)["properties"]}
    is_strict = deployment.api.unknown_params == "error"
    for route in routes:
        if route.body is not None and route.has_parameters:
            name = route.body.__name__
            schemas[name] = with_parameters(names[name], parameters, is_strict=is_strict)
    keys = {"bearer": {"type": "http", "scheme": "bearer"}} if deployment.api.api_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"{deployment.name}: {spec.title}",
            "version": deployment.versions.get("mstarctl", "0"),
            "description": "API of one deployment. All routes use the same error format.",
        },
        "paths": _paths(routes, schemas, has_keys=bool(keys)),
        "components": {"schemas": schemas, **({"securitySchemes": keys} if keys else {})},
    }


def components(routes: Iterable[HttpRoute]) -> dict[str, Json]:
    """Return the schemas of all types that routes refer to, directly or indirectly, by name."""
    kinds = {kind for route in routes for kind in (route.body, route.answer) if kind is not None} | {ErrorBody}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    return dict(msgspec.json.schema_components(ordered, ref_template=REF)[1])


def with_parameters(schema: Json, parameters: Mapping[str, Json], *, is_strict: bool) -> Json:
    """Return a request schema extended by model parameters and by accepted fields that have no effect."""
    properties = dict(schema["properties"])
    for name, parameter in parameters.items():
        properties.setdefault(name, _or_null(parameter))
    for name in sorted(SILENT):
        properties.setdefault(name, {"description": "accepted, without effect"})
    for name, harmless in NO_EFFECT.items():
        properties.setdefault(name, {"enum": [*harmless, None], "description": "not supported"})
    return {**schema, "properties": properties, "additionalProperties": not is_strict}


def _or_null(parameter: Json) -> Json:
    """Return the schema of a parameter that may be null, which means its default."""
    if "anyOf" in parameter:
        return {**parameter, "anyOf": [*parameter["anyOf"], {"type": "null"}]}
    kinds = parameter.get("type")
    if kinds is None:
        return parameter
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    nullable = {**parameter, "type": kinds if "null" in kinds else [*kinds, "null"]}
    if None not in parameter.get("enum", [None]):
        nullable["enum"] = [*parameter["enum"], None]
    return nullable


def _paths(routes: Sequence[HttpRoute], schemas: Mapping[str, Json], *, has_keys: bool) -> Json:
    paths: Json = {}
    for route in routes:
        operation = _operation(route, schemas)
        if has_keys and not route.is_open:
            operation["security"] = [{"bearer": []}]
        paths.setdefault(shown_path(route.path), {})[route.method.lower()] = operation
    return paths


def _operation(route: HttpRoute, schemas: Mapping[str, Json]) -> Json:
    operation: Json = {"operationId": route.name, "summary": route.summary, "responses": _responses(route)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in PATH_PARAMETER.findall(shown_path(route.path))
    ]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)} for name, schema in route.query.items()
    ]
    if route.body is not None:
        parameters += [
            {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
            for name, schema, text in (HEADERS if route.has_parameters else (ID_HEADER,))
        ]
        content = {kind: {"schema": _body(route, kind, schemas)} for kind in route.takes}
        operation["requestBody"] = {"required": True, "content": content}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _body(route: HttpRoute, kind: str, schemas: Mapping[str, Json]) -> Json:
    assert route.body is not None
    name = route.body.__name__
    if kind == JSON:
        return {"$ref": REF.format(name=name)}
    schema = schemas[name]
    properties = {key: _field(value) for key, value in schema["properties"].items()}
    file = {"type": "string", "format": "binary"}
    if route.body is GenerateRequest:
        properties["model_kwargs"] = {"type": "string", "description": "a JSON object: parameters of the model"}
        properties.pop("files")
    if kind == FORM:
        several = {"type": "array", "items": file}
        properties |= {field: several if is_several else file for field, is_several in route.files.items()}
    required = [*schema.get("required", ()), *(route.files if kind == FORM and route.needs else ())]
    merged = {**schema, "properties": properties}
    return {**merged, "required": required} if required else merged


def _field(schema: Json) -> Json:
    """Return the schema of a form field, where lists and objects are JSON text."""
    kind = schema.get("type")
    is_list = kind in ("array", "object") or (isinstance(kind, list) and {"array", "object"} & set(kind))
    if not is_list and not any(choice.get("type") in ("array", "object") for choice in schema.get("anyOf", ())):
        return schema
    return {"type": "string", "description": f"{schema.get('description', '')} (JSON)".strip()}


def _responses(route: HttpRoute) -> Json:
    content: Json = {}
    if route.answer is not None:
        content[JSON] = {"schema": {"$ref": REF.format(name=route.answer.__name__)}}
    for kind in route.gives:
        is_text = kind.startswith("text/") and kind != EVENTS
        content[kind] = {"schema": {"type": "string"} if is_text else {}}
    responses: Json = {"200": {"description": "the response", "content": content}}
    for status in (*route.errors, *((405,) if URLENCODED in route.takes else ())):
        responses[str(status)] = {"description": _phrase(status), "content": _error(route, status)}
    return responses


def _error(route: HttpRoute, status: int) -> Json:
    schema = {"$ref": REF.format(name="ErrorBody")}
    if status == 503 and route.answer is not None and not route.reads_body:
        schema = {"$ref": REF.format(name=route.answer.__name__)}
    return {JSON: {"schema": schema}}


def _phrase(status: int) -> str:
    return "cancelled" if status == 499 else HTTPStatus(status).phrase.lower()
