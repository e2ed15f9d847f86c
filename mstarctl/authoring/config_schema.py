"""Explanation of configuration keys and JSON schema of deployment files. Used by `mstarctl config`."""

from __future__ import annotations

from typing import Any

from mstar_core.config.key import ITEM, Setting
from mstar_core.config.schema import SETTINGS, words_of
from mstar_core.errors import NotFound, did_you_mean


def explain(key: str) -> Setting:
    """Return the setting that `key` names (`node_groups.0.ranks` too). Raises NotFound with the nearest key."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    keys = [part for part in parts if part and not part.isdigit()]
    plain = {item.key.replace(ITEM, ""): item for item in SETTINGS}
    name = ".".join(keys)
    if name not in plain:
        last = {item.word: item for item in SETTINGS}
        if len(keys) == 1 and name in last:
            return last[name]
        raise NotFound(f"no configuration key {key!r}", hint=did_you_mean(name, [*plain, *last]), kind="key", name=key)
    return plain[name]


def default_shown(item: Setting) -> str:
    """Return the default as written in files and docs."""
    if item.default_text:
        return item.default_text
    if item.required:
        return "required"
    if item.kind == "section":
        return ""
    if isinstance(item.default, bool):
        return "true" if item.default else "false"
    return "null" if item.default is None else str(item.default)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a deployment file, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mstar deployment"}
    return {**schema, **_object("")}


def _object(parent: str) -> dict[str, Any]:
    words = words_of(parent)
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {word: _property(item) for word, item in words.items()},
    }
    required = [word for word, item in words.items() if item.required]
    return {**schema, "required": required} if required else schema


def _property(item: Setting) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": item.doc}
    match item.kind:
        case "section":
            return {**schema, **_object(item.key)}
        case "list of section":
            return {**schema, "type": "array", "minItems": 1, "items": _object(item.key + ITEM)}
        case "mapping":
            return {**schema, "type": "object"}
        case "list of string" | "list of integer":
            return {
                **schema,
                "type": "array",
                "minItems": 1,
                "items": {"type": item.kind.removeprefix("list of "), **item.bounds},
            }
        case _:
            kind: Any = [item.kind, "null"] if item.nullable else item.kind
            schema |= {"type": kind, **item.bounds}
            if item.choices:
                schema["enum"] = [*item.choices, None] if item.nullable else list(item.choices)
            return schema if item.required or item.default is None else {**schema, "default": item.default}
