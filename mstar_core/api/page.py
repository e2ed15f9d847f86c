"""The OpenAPI description as one HTML page: nothing is loaded from elsewhere, nothing runs in it. Used by app."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any, Final

STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #8884;padding:.2rem .6rem;text-align:left;"
    "vertical-align:top}code{font:.9em ui-monospace,monospace}h2{margin-top:2.5rem}:root{color-scheme:light dark}"
)

Json = Mapping[str, Any]


def docs_html(document: Json) -> str:
    """The page."""
    info = document["info"]
    schemas = document["components"]["schemas"]
    body = [f"<h1>{_text(info['title'])}</h1>", f"<p>Version {_text(info['version'])}. {_text(info['description'])}"]
    body.append('The same for programs: <a href="openapi.json">openapi.json</a>.</p>')
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body += _operation(path, method, operation, schemas)
    body.append("<h2>Types</h2>")
    for name in sorted(schemas):
        body += _schema(name, schemas[name])
    head = f'<meta charset="utf-8"><title>{_text(info["title"])}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _operation(path: str, method: str, operation: Json, schemas: Json) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {_text(path)}</code></h2><p>{_text(operation['summary'])}.</p>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Takes <code>{_text(kind)}</code>: {_type(content['schema'])}</p>"
    for status, answer in operation["responses"].items():
        if status == "200":
            for kind, content in answer["content"].items():
                yield f"<p>Gives <code>{_text(kind)}</code>: {_type(content['schema'])}</p>"
    errors = ", ".join(status for status in operation["responses"] if status != "200")
    if errors:
        yield f"<p>Errors: {_text(errors)}.</p>"


def _schema(name: str, schema: Json) -> Iterator[str]:
    yield f'<h3 id="{_text(name)}">{_text(name)}</h3><p>{_text(schema.get("description", ""))}</p>'
    properties = schema.get("properties", {})
    if not properties:
        return
    required = schema.get("required", ())
    yield "<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>"
    for field, each in properties.items():
        default = "required" if field in required else _default(each)
        yield (
            f"<tr><td><code>{_text(field)}</code></td><td>{_type(each)}</td><td>{_text(default)}</td>"
            f"<td>{_text(each.get('description', ''))}</td></tr>"
        )
    yield "</table>"


def _default(schema: Json) -> str:
    value = schema.get("default")
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _type(schema: Json) -> str:
    """A type in few words, as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f'<a href="#{_text(name)}">{_text(name)}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"<code>{_text(str(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    kind = schema.get("type", "any")
    words = " or ".join(each for each in kind if each != "null") if isinstance(kind, list) else str(kind)
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = [f"from {low:g}"] if low is not None else []
    bounds += [f"to {high:g}"] if high is not None else []
    return _text(" ".join([words, *bounds]))


def _text(text: str) -> str:
    return html.escape(str(text))
