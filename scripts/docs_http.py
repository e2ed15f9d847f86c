"""Generated parts of docs/http-api.md: routes, request fields, limits. Used by docs_parts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

LIMITS = (
    "max_body_bytes",
    "max_text_bytes",
    "max_files",
    "max_speech_chars",
    "max_n",
    "max_prompts",
    "max_requests_per_key",
    "max_connections",
    "max_image_pixels",
    "max_image_side",
    "max_audio_s",
    "max_video_s",
    "max_video_frames",
    "max_video_width",
    "max_video_height",
    "max_decoded_bytes",
    "timeout_s",
    "stall_timeout_s",
    "pool_processes",
    "responses_ttl_s",
    "responses_max_count",
    "responses_max_bytes",
    "realtime_max_sessions",
    "realtime_idle_s",
    "realtime_max_s",
    "sessions_idle_s",
    "sessions_ttl_s",
    "sessions_max_count",
    "sessions_media_bytes",
)
"""Keys of `api` that limit requests."""


def http_routes() -> str:
    """Return the table of routes: path, request and response types, summary, condition."""
    from mstar_core.api.route_table import ROUTES, shown_path

    def row(route: Any) -> tuple[str, ...]:
        path = f"`{route.method} {shown_path(route.path).replace('{name}', '{id}')}`"
        takes = ", ".join(f"`{kind}`" for kind in route.takes)
        gives = [*(["application/json"] if route.answer is not None else []), *route.gives]
        mapped = " or ".join(f"`{name}`" for name in route.needs)
        offered = f"the model maps {mapped}" if mapped else "always"
        return path, takes, ", ".join(f"`{kind}`" for kind in gives), route.summary, offered

    return _table(("route", "request", "response", "summary", "available if"), [row(route) for route in ROUTES])


def fields_of(name: str) -> Callable[[], str]:
    """Return the part with the fields of the request type `name`."""

    def part() -> str:
        from mstar_core.api.openapi import components
        from mstar_core.api.route_table import ROUTES

        schema = components(ROUTES)[name]
        return _table(("field", "type", "default", ""), _fields(schema, components(ROUTES)))

    return part


def http_sampling() -> str:
    """Return the table of sampling parameters."""
    from mstar_core.graph.declare.sampling import TextSampling
    from mstar_core.plugin import param_specs

    def row(spec: Any) -> tuple[str, ...]:
        off = "`{}`" if spec.nullable else f"`{spec.default:g}`"
        size = f", at most {spec.max_items} ids" if spec.max_items else ""
        return f"`{spec.name}`", spec.kind, off, spec.limits_text + size, spec.doc

    rows = [row(spec) for spec in param_specs(TextSampling)]
    return _table(("parameter", "type", "off", "range", ""), rows)


def web_policy() -> str:
    """Return the content security policy of the web pages."""
    from mstar_core.api.console.assets import POLICY

    return "```\nContent-Security-Policy:\n  " + POLICY.replace("; ", ";\n  ") + "\n```"


def http_limits() -> str:
    """Return the table of limits, from the schema of deployment files."""
    from mstar_core.config.schema import SETTINGS
    from mstarctl.authoring.config_schema import default_shown

    keys = {setting.key: setting for setting in SETTINGS}
    rows = [(f"`api.{name}`", default_shown(keys[f"api.{name}"]), keys[f"api.{name}"].doc) for name in LIMITS]
    return _table(("key", "default", ""), rows)


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, each in schema["properties"].items():
        default = each.get("default")
        shown = "required" if name in required else "" if default is None else f"`{_plain(default)}`"
        yield f"`{name}`", _type(each, schemas), shown, each.get("description", _inner(each, schemas))


def _inner(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    found = [each.get("description") for each in schema.get("anyOf", ()) if each.get("description")]
    return found[0] if found else ""


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in schema:
        inner = schemas[schema["$ref"].rpartition("/")[2]]
        tag = inner["properties"].get("type", {}).get("enum")
        return f"{{{', '.join(_member(tag, name) for name in inner['properties'])}}}"
    if "anyOf" in schema:
        kinds = [_type(each, schemas) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "any"))


def _member(tag: list[str] | None, name: str) -> str:
    return f"type: {tag[0]}" if name == "type" and tag else name


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


HTTP_PARTS: dict[str, Callable[[], str]] = {
    "web-policy": web_policy,
    "http-routes": http_routes,
    "http-limits": http_limits,
    "http-sampling": http_sampling,
    "http-generate": fields_of("GenerateRequest"),
    "http-chat": fields_of("ChatRequest"),
    "http-responses": fields_of("ResponsesRequest"),
    "http-completion": fields_of("CompletionRequest"),
    "http-embedding": fields_of("EmbeddingRequest"),
    "http-tokenize": fields_of("TokenizeRequest"),
    "http-speech": fields_of("SpeechRequest"),
    "http-transcription": fields_of("TranscriptionRequest"),
    "http-video": fields_of("VideoRequest"),
    "http-image": fields_of("ImageRequest"),
}
"""Parts by name, for docs_parts.PARTS."""
