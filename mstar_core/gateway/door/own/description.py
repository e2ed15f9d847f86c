"""Merged OpenAPI description of the models behind the gateway."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from mstar_core.version import __version__

SCHEMAS: Final = "#/components/schemas/"
MODELS: Final = "x-mstar-models"
"""Field of an operation that names the models which offer it."""


def merged(documents: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return one description of several models' documents, by name.

    An operation that several models offer is described as by the first of them. A schema that differs between models
    has one version for each, whose name ends with the model's.
    """
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "mstar gateway",
            "version": __version__,
            "description": "All models of the gateway. /m/MODEL/openapi.json describes one model exactly.",
        },
        "paths": {},
        "components": {"schemas": {}, "securitySchemes": {}},
    }
    for model, document in documents:
        _add(whole, model, document)
    return whole


def _add(whole: dict[str, Any], model: str, document: dict[str, Any]) -> None:
    schemas = whole["components"]["schemas"]
    own = document.get("components", {}).get("schemas", {})
    renamed = {name: f"{name}.{model}" for name, schema in own.items() if schemas.get(name, schema) != schema}
    while True:  # a schema that names a renamed one differs too
        more = {
            name: f"{name}.{model}" for name, schema in own.items() if name not in renamed and _names(schema, renamed)
        }
        if not more:
            break
        renamed |= more
    for name, schema in own.items():
        schemas.setdefault(renamed.get(name, name), _renamed(schema, renamed))
    for name, scheme in document.get("components", {}).get("securitySchemes", {}).items():
        whole["components"]["securitySchemes"].setdefault(name, scheme)
    if "security" in document:
        whole.setdefault("security", document["security"])
    for path, methods in document.get("paths", {}).items():
        shown = whole["paths"].setdefault(path, {})
        for method, operation in methods.items():
            if not isinstance(operation, dict):
                shown.setdefault(method, operation)
                continue
            known = shown.setdefault(method, {**_renamed(operation, renamed), MODELS: []})
            known[MODELS].append(model)


def _names(value: Any, renamed: dict[str, str]) -> bool:
    """Return whether a schema refers to one of the renamed schemas."""
    match value:
        case dict():
            return any(
                isinstance(part, str)
                and key == "$ref"
                and part.removeprefix(SCHEMAS) in renamed
                or _names(part, renamed)
                for key, part in value.items()
            )
        case list():
            return any(_names(part, renamed) for part in value)
        case _:
            return False


def _renamed(value: Any, renamed: dict[str, str]) -> Any:
    """Return a copy of a value whose references name the renamed schemas."""
    match value:
        case dict():
            return {
                key: f"{SCHEMAS}{renamed.get(part.removeprefix(SCHEMAS), part.removeprefix(SCHEMAS))}"
                if key == "$ref" and isinstance(part, str) and part.startswith(SCHEMAS)
                else _renamed(part, renamed)
                for key, part in value.items()
            }
        case list():
            return [_renamed(part, renamed) for part in value]
        case _:
            return value
