"""Objects of schemas: no members beside their `properties`, unless the schema asks for some."""

from __future__ import annotations

from typing import Any, Final

import pytest

from mstar_core.constraints.answers import of_answer
from mstar_core.constraints.content import JsonText
from mstar_core.plugin.chat.format import ChatFormat

from .test_tool_calls import admits

A: Final[dict[str, Any]] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED: Final = {
    "an object": (A, '{"a": 1}', '{"a": 1, "b": 2}'),
    "no members": ({"type": "object", "properties": {}}, "{}", '{"b": 2}'),
    "within a list": ({"type": "array", "items": A, "maxItems": 1}, '[{"a": 1}]', '[{"a": 1, "b": 2}]'),
    "within a member": (
        {"type": "object", "properties": {"o": A}, "additionalProperties": True},
        '{"o": {"a": 1}, "b": 2}',
        '{"o": {"a": 1, "b": 2}}',
    ),
    "behind a reference": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a": 1}', '{"a": 1, "b": 2}'),
    "one of two": ({"anyOf": [A, {"type": "null"}]}, '{"a": 1}', '{"a": 1, "b": 2}'),
    "a member called like a keyword": (
        {"type": "object", "properties": {"allOf": {"type": "integer"}, "not": {"enum": [{"properties": {}}]}}},
        '{"allOf": 1, "not": {"properties": {}}}',
        '{"allOf": 1, "b": 2}',
    ),
}
OPEN: Final = {
    "asked for": ({**A, "additionalProperties": True}, '{"a": 1, "b": 2}'),
    "any object": ({"type": "object"}, '{"b": 2}'),
    "by a pattern": ({**A, "patternProperties": {"^b": {"type": "integer"}}}, '{"a": 1, "b": 2}'),
    "a required member without a schema": ({**A, "required": ["a", "b"]}, '{"a": 1, "b": 2}'),
    "two schemas for one object": (
        {"allOf": [A, {"type": "object", "properties": {"b": {"type": "integer"}}}]},
        '{"a": 1, "b": 2}',
    ),
    "a reference beside members": (
        {"properties": {"b": {"type": "integer"}}, "$ref": "#/$defs/A", "$defs": {"A": A}},
        '{"b": 2, "a": 1}',
    ),
}


def holds(schema: dict[str, Any], text: str, *, is_strict: bool = False) -> bool:
    """Return whether a text obeys the grammar of a schema."""
    return admits(of_answer(ChatFormat(), content=JsonText(schema=schema, is_strict=is_strict)), text)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("name", CLOSED)
def test_an_object_has_no_members_beside_its_properties(name: str, is_strict: bool) -> None:
    schema, whole, more = CLOSED[name]
    assert holds(schema, whole, is_strict=is_strict)
    assert not holds(schema, more, is_strict=is_strict)


@pytest.mark.parametrize("name", OPEN)
def test_a_schema_that_asks_for_other_members_has_them(name: str) -> None:
    assert holds(*OPEN[name])
