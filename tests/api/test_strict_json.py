"""Strict JSON: values as the standard library reads them, and every refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.api.http.strict_json import MAX_DEPTH, parse_json
from mstar_core.errors import RequestError

TEXTS = st.text(st.sampled_from('ab:",{}[]\\ \u00e9\ud800'), max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)


def outcome(parse: Any, data: bytes | str) -> tuple[str, str]:
    """Return the value, with the types of its numbers and the order of its keys, or the refusal."""
    try:
        return "value", repr(parse(data))
    except (RequestError, ValueError):
        return "refused", ""


def is_allowed(value: Any) -> bool:
    """Return whether all strings are valid Unicode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(VALUES.filter(is_allowed), st.booleans(), st.sampled_from([None, 1]))
def test_every_value_is_read_as_the_standard_library_reads_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    if "Infinity" in text:
        assert outcome(parse_json, text)[0] == "refused"
    else:
        assert outcome(parse_json, text) == outcome(parse_json, text.encode()) == outcome(json.loads, text)


@given(TEXTS.filter(lambda text: not is_allowed(text)))
def test_half_a_character_is_refused(text: str) -> None:
    for data in (json.dumps(text), json.dumps({text: 1}), json.dumps([text], ensure_ascii=False)):
        with pytest.raises(RequestError):
            parse_json(data)


@given(VALUES.filter(is_allowed), st.data())
def test_a_broken_text_is_refused_as_the_standard_library_refuses_it(value: Any, draw: st.DataObject) -> None:
    data = json.dumps(value).encode()
    start = draw.draw(st.integers(0, len(data)))
    end = draw.draw(st.integers(start, len(data)))
    broken = data[:start] + draw.draw(st.sampled_from([b"", b":", b'"', b",", b"9", b"\\", b"\xff", b"}"])) + data[end:]
    if outcome(json.loads, broken)[0] == "refused":
        assert outcome(parse_json, broken)[0] == "refused"


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '[0, {"a": {"b": 1, "b": 1}}]',
        '{"a": 1, "\\u0061": 2}',
        '{"a": "x:", "a": ":"}',
        '{"a": 1, "a": "\\u003a"}',
        '{"a": 1, "a": "\\u003A"}',
        '{"": 1, "": 2}',
    ],
)
def test_a_key_that_stands_twice_is_found(text: str) -> None:
    with pytest.raises(RequestError, match="is duplicated"):
        parse_json(text)


@pytest.mark.parametrize("text", ['{"a:b": "c:d"}', '{"a": "\\u003a"}', '{"a\\u003A": {":": [":", {"::": ""}]}}'])
def test_colons_in_strings_are_no_members(text: str) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("inner", ["1", "", "[]", "[[]]", '"x"', "1, 2", '{"a": 1}'])
@pytest.mark.parametrize("depth", range(MAX_DEPTH - 2, MAX_DEPTH + 2))
def test_depth_is_counted_alike_in_lists_of_numbers(inner: str, depth: int) -> None:
    text = "[" * depth + inner + "]" * depth
    deepest = depth + {"": -1, "[]": 0, "[[]]": 1, '{"a": 1}': 1}.get(inner, 0)
    assert (outcome(parse_json, text)[0] == "refused") == (deepest > MAX_DEPTH)


@pytest.mark.parametrize(
    "text", ["1e999", "[1, -1e999, 2]", '{"a": [[0.5], [1e400]]}', "NaN", "[Infinity]", "9" * 5000]
)
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_json(text)
