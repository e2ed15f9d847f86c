"""Schemas as rules of a grammar. Used by grammars of answers and of tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

WHITE_SPACE: Final = r"\n?[ \t]{0,16}"
"""White space between two tokens of JSON: a line break and its indentation. Without a bound a model may never end."""

OPTIONS: Final = {"whitespace_pattern": WHITE_SPACE}
LENIENT: Final = {**OPTIONS, "lenient": True, "coerce_one_of": True}
"""Keywords that the compiler does not know are left out, and `oneOf` is read as `anyOf`."""

MAPS: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES: Final = (
    *("items", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("not", "if", "then", "else"),
)
"""Keywords whose values are schemas: by name, in a list, or one."""

COMBINING: Final = frozenset(
    ("$ref", "$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "dependentSchemas")
)
"""Keywords that apply other schemas to the same value."""

OPENING: Final = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"))
"""Keywords that say which members an object has beside its `properties`, or that it needs some."""

LEAST: Final = 1e-9
"""Least distance of a number from an exclusive bound of zero."""

BOUNDS: Final = (("minimum", "exclusiveMinimum", LEAST, max), ("maximum", "exclusiveMaximum", -LEAST, min))
"""(bound, its exclusive form, value in place of an exclusive zero, function that returns the narrower bound)."""


def json_rule(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return the right side of a rule: JSON that obeys a schema. is_strict: a keyword without a grammar is an error."""
    exact = apart_from_zero(closed(schema))
    return f"%json {json.dumps({**exact, 'x-guidance': OPTIONS if is_strict else LENIENT})}"


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema whose objects have no members beside their `properties`, unless they ask for some.

    Such members are allowed by JSON Schema, and a reader who named the properties expects none. A schema that combines
    several for one object is returned unchanged, because another of them may name the members.
    """
    if any(node.keys() & COMBINING and ("allOf" in node or "properties" in node) for node in _nodes(schema)):
        return schema
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for node in _nodes(copy):
        if not node.keys() & OPENING and _names_all(node):
            node["additionalProperties"] = False
    return copy


def apart_from_zero(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in which exclusive bounds of zero are bounds beside it.

    The compiler admits 0 itself for an exclusive bound of zero if the other bound is a fraction.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for node in _nodes(copy):
        for bound, exclusive, beside, closest in BOUNDS:
            if node.get(exclusive) == 0 and node[exclusive] is not False:  # a boolean in old drafts
                del node[exclusive]
                present = node.get(bound)
                node[bound] = closest(present, beside) if isinstance(present, int | float) else beside
    return copy


def _names_all(node: Mapping[str, Any]) -> bool:
    """Return whether the `properties` of an object name all required members."""
    members, required = node.get("properties"), node.get("required", [])
    if not isinstance(members, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in members for name in required)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it. Their depth is limited by the parser of bodies."""
    if not isinstance(schema, dict):
        return
    within = [schema[key] for key in SINGLES if key in schema]
    for key in LISTS:
        within += each if isinstance(each := schema.get(key), list) else []
    for key in MAPS:
        within += each.values() if isinstance(each := schema.get(key), dict) else []
    yield schema
    for each in within:
        yield from _nodes(each)
