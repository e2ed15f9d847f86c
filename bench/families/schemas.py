"""JSON schemas in the style of the JSON Schema Test Suite, which grammars hold with every keyword, and their judge.

`written` are by hand, one for each keyword and for common combinations. `drawn` are random nested ones of a seed.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from datetime import date
from decimal import Decimal
from typing import Any, Final

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]
TIME: Final = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)
"""Time of RFC 3339. The validator has no check of it without a further package."""

DEPTH: Final = 3
"""Most levels of drawn schemas below their root."""

FORMATS: Final = ("date", "time", "date-time", "email", "ipv4", "uuid", "hostname")
PATTERNS: Final = ("^[A-Z]{2}-[0-9]{4}$", "^(red|green|blue)$", "^[a-f0-9]{8}$", r"^\d{1,3}(\.\d{1,2})?$", "^x+y?z*$")
WORDS: Final = ("name", "age", "kind", "size", "tags", "note", "left", "right", "ok", "x y", 'quo"te', "größe", "")


def whole(properties: Mapping[str, Any], *, optional: tuple[str, ...] = (), **more: Any) -> Schema:
    """Return a closed object, of which every property is required unless it is optional."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
        **more,
    }


def items(schema: Any, least: int, most: int) -> Schema:
    """Return an array of bounded length."""
    return {"type": "array", "items": schema, "minItems": least, "maxItems": most}


FORMAT_CHECKER: Final = FormatChecker(("date", "email", "ipv4", "uuid"))


@FORMAT_CHECKER.checks("time")
def is_time(value: object) -> bool:
    """Return whether a value is a time of RFC 3339, or no text."""
    return not isinstance(value, str) or TIME.fullmatch(value) is not None


@FORMAT_CHECKER.checks("date-time", ValueError)
def is_date_time(value: object) -> bool:
    """Return whether a value is a date and time of RFC 3339, or no text. Raises ValueError for a date that is none."""
    if not isinstance(value, str):
        return True
    date.fromisoformat(value[:10])
    return value[10:11] in tuple("tT") and is_time(value[11:])


SHORT: Final[Schema] = {"type": "string", "maxLength": 8}
DIGIT: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 9}
TREE: Final[Schema] = {
    "$defs": {"tree": whole({"value": DIGIT, "children": items({"$ref": "#/$defs/tree"}, 0, 2)})},
    "$ref": "#/$defs/tree",
}
LIST: Final[Schema] = whole({"head": DIGIT, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})


def written() -> dict[str, Schema]:
    """Return the schemas by hand, by name."""
    found: dict[str, Any] = {
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "integer from 0 to 9": DIGIT,
        "negative integer": {"type": "integer", "minimum": -500, "maximum": -3},
        "integer across zero": {"type": "integer", "minimum": -7, "maximum": 12},
        "exclusive integers": {"type": "integer", "exclusiveMinimum": 4, "exclusiveMaximum": 17},
        "large integers": {"type": "integer", "minimum": 10**12, "maximum": 10**12 + 99},
        "multiple of 5": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5},
        "multiple of a hundredth": {"type": "number", "minimum": 0, "maximum": 3, "multipleOf": 0.01},
        "number from 0 to 1": {"type": "number", "minimum": 0, "maximum": 1},
        "number across zero": {"type": "number", "minimum": -1.5, "maximum": 2.25},
        "exclusive numbers": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        "number with one bound": {"type": "number", "minimum": 99.5},
        "short string": SHORT,
        "string of exact length": {"type": "string", "minLength": 5, "maxLength": 5},
        "string with a least length": {"type": "string", "minLength": 3, "maxLength": 12},
        "pattern without anchors": {"type": "string", "pattern": "[0-9]{3}", "maxLength": 20},
        "pattern with one anchor": {"type": "string", "pattern": "^ab?c", "maxLength": 12},
        "pattern of quotes": {"type": "string", "pattern": '^"[a-z]{2}"$'},
        "pattern of backslashes": {"type": "string", "pattern": r"^\\[a-z]\\$"},
        "pattern of letters beyond ASCII": {"type": "string", "pattern": "^[äöü]{2,4}$"},
        "pattern and lengths": {"type": "string", "pattern": "^[a-z]+$", "minLength": 4, "maxLength": 6},
        "enum of texts": {"enum": ["red", "green", "blue"]},
        "enum of all types": {"enum": [1, 2.5, "three", None, True, [1], {"a": 1}]},
        "enum with a type": {"type": "string", "enum": ["a", "b"]},
        "enum of quotes": {"enum": ['say "hi"', "back\\slash", "line\nbreak"]},
        "const number": {"const": 42},
        "const object": {"const": {"a": [1, 2, {"b": None}]}},
        "nullable string": {"type": ["string", "null"], "maxLength": 6},
        "nullable object": {"anyOf": [whole({"a": DIGIT}), {"type": "null"}]},
        "several types": {"type": ["boolean", "null", "integer"], "minimum": 0, "maximum": 3},
        "array of three": items(DIGIT, 3, 3),
        "array up to two": items({"type": "boolean"}, 0, 2),
        "tuple": {"type": "array", "prefixItems": [DIGIT, SHORT, {"type": "null"}], "items": False, "minItems": 3},
        "tuple and rest": {
            "type": "array",
            "prefixItems": [{"const": "head"}],
            "items": DIGIT,
            "minItems": 2,
            "maxItems": 4,
        },
        "array of arrays": items(items({"type": "boolean"}, 1, 2), 1, 2),
        "empty object": whole({}),
        "one property": whole({"a": DIGIT}),
        "optional properties": whole({"a": DIGIT, "b": SHORT, "c": {"type": "null"}}, optional=("b", "c")),
        "all optional": whole({"a": DIGIT, "b": {"type": "boolean"}}, optional=("a", "b")),
        "required without a schema": {"type": "object", "required": ["a"], "additionalProperties": DIGIT},
        "names with quotes and accents": whole({'quo"te': DIGIT, "größe": DIGIT, "x y": DIGIT, "": DIGIT}),
        "open object": {
            "type": "object",
            "properties": {"a": DIGIT},
            "required": ["a"],
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 3,
        },
        "map of numbers": {"type": "object", "additionalProperties": DIGIT, "minProperties": 1, "maxProperties": 2},
        "pattern of names": {
            "type": "object",
            "patternProperties": {"^n_[a-z]{1,4}$": DIGIT},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 3,
        },
        "nested objects": whole({"a": whole({"b": whole({"c": whole({"d": DIGIT})})})}),
        "any of objects": {"anyOf": [whole({"kind": {"const": "a"}, "x": DIGIT}), whole({"kind": {"const": "b"}})]},
        "any of arrays and numbers": {"anyOf": [items(DIGIT, 1, 2), {"type": "number", "minimum": 5, "maximum": 6}]},
        "all of bounds": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        "all of objects": {
            "allOf": [
                {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
                {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ],
            "properties": {"a": True, "b": True},
            "additionalProperties": False,
        },
        "reference": {"$defs": {"digit": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/digit"}, "maxItems": 3},
        "reference beside keywords": {
            "$defs": {"n": {"type": "integer"}},
            "$ref": "#/$defs/n",
            "minimum": 1,
            "maximum": 4,
        },
        "old definitions": {"definitions": {"d": DIGIT}, **whole({"a": {"$ref": "#/definitions/d"}})},
        "reference with escapes": {"$defs": {"a/b~c": DIGIT}, **whole({"a": {"$ref": "#/$defs/a~1b~0c"}})},
        "tree": TREE,
        "list by recursion": LIST,
        "true and false": whole({"a": DIGIT, "never": False}, optional=("never",)),
        "titles and descriptions": whole(
            {"a": {**DIGIT, "title": "A", "description": "a digit", "default": 3}}, title="T"
        ),
        "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", **whole({"a": SHORT})},
        "record": whole(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "email": {"type": ["string", "null"], "maxLength": 10},
                "tags": items({"enum": ["new", "old", "sold"]}, 0, 3),
                "address": whole({"street": SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
            },
            optional=("email",),
        ),
    }
    found |= {f"format {name}": {"type": "string", "format": name} for name in FORMATS}
    return found


def drawn(count: int, seed: int = 1) -> dict[str, Schema]:
    """Return random schemas, by name."""
    source = random.Random(seed)
    return {f"drawn {number}": _root(source) for number in range(count)}


def _root(source: random.Random) -> Schema:
    shared = {f"part{number}": _any(source, DEPTH - 2, ()) for number in range(source.randint(0, 2))}
    schema = _object(source, DEPTH, tuple(shared))
    return {**schema, "$defs": shared} if shared else schema


def _any(source: random.Random, depth: int, parts: tuple[str, ...]) -> Schema:
    """Draw a schema. parts: names of shared ones that it may refer to."""
    if parts and source.random() < 0.2:
        return {"$ref": f"#/$defs/{source.choice(parts)}"}
    flat: list[Callable[[], Schema]] = [lambda: _integer(source), lambda: _number(source), lambda: _text(source)]
    flat += [lambda: _choice(source), lambda: {"type": source.choice(["boolean", "null"])}]
    if depth <= 0:
        return source.choice(flat)()
    nested: list[Callable[[], Schema]] = [
        lambda: _object(source, depth - 1, parts),
        lambda: items(_any(source, depth - 1, parts), least := source.randint(0, 2), least + source.randint(0, 2)),
        lambda: {"anyOf": [_any(source, depth - 1, parts) for _ in range(source.randint(2, 3))]},
        lambda: {"anyOf": [_any(source, depth - 1, parts), {"type": "null"}]},
    ]
    return source.choice([*flat, *nested])()


def _object(source: random.Random, depth: int, parts: tuple[str, ...]) -> Schema:
    names = source.sample(WORDS, source.randint(1, 4))
    optional = tuple(name for name in names if source.random() < 0.3)
    return whole({name: _any(source, depth - 1, parts) for name in names}, optional=optional)


def _integer(source: random.Random) -> Schema:
    low = source.choice([-1000, -10, -1, 0, 1, 7, 250])
    keys = source.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    schema = {"type": "integer", keys[0]: low, keys[1]: low + source.choice([2, 9, 10, 99, 1234])}
    return {**schema, "multipleOf": 2} if source.random() < 0.2 else schema


def _number(source: random.Random) -> Schema:
    low = source.choice([-100.5, -1.25, 0, 0.001, 3.5])
    return {"type": "number", "minimum": low, "maximum": low + source.choice([0.5, 1, 10.25, 1000])}


def _text(source: random.Random) -> Schema:
    kind = source.random()
    if kind < 0.3:
        return {"type": "string", "pattern": source.choice(PATTERNS)}
    if kind < 0.4:
        return {"type": "string", "format": source.choice(FORMATS)}
    least = source.randint(0, 4)
    return {"type": source.choice(["string", ["string", "null"]]), "minLength": least, "maxLength": least + 6}


def _choice(source: random.Random) -> Schema:
    values: list[Any] = [*WORDS, 0, 1, -2.5, None, True, [], {}, {"a": [1]}]
    if source.random() < 0.3:
        return {"const": source.choice(values)}
    return {"enum": source.sample(values, source.randint(1, 5))}


def proof_schemas(count: int = 200) -> dict[str, Schema]:
    """Return so many schemas: those by hand, then drawn ones."""
    found = written()
    return dict(list({**found, **drawn(max(0, count - len(found)))}.items())[:count])


def fault(schema: Schema, text: str) -> str:
    """Return why a text is not JSON that obeys a schema; empty if it is. Numbers are compared as decimals."""
    try:
        value = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        return f"not JSON: {error}"
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    found = next(Draft202012Validator(exact, format_checker=FORMAT_CHECKER).iter_errors(value), None)
    return "" if found is None else f"{found.json_path}: {found.message}"
