"""The fast parser of request bodies: it takes what the standard library takes under our rules, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.api.http import strict_json
from mstar_core.api.http.strict_json import MAX_DEPTH, parse_json
from mstar_core.errors import RequestError

TEXTS = st.text(st.sampled_from('ab:",{}[]\\ \u00e9\ud800'), max_size=6)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=12
)


def outcome(parse: Any, data: bytes | str) -> tuple[str, str]:
    """What came of a text: the value with the types of its numbers and the order of its keys, or what was refused."""
    try:
        return "value", repr(parse(data, "the body"))
    except RequestError as error:
        return "refused", str(error)


def told_slowly(data: bytes | str, what: str) -> Any:
    """The text read by the standard library's parser alone."""
    return strict_json._parse_slowly(data, what)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_every_value_is_read_as_the_standard_library_reads_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    data = text.encode(errors="surrogatepass")
    assert outcome(parse_json, data) == outcome(told_slowly, data)
    assert outcome(parse_json, text) == outcome(told_slowly, text)


@given(VALUES, st.data())
def test_a_broken_text_is_refused_with_the_same_words(value: Any, draw: st.DataObject) -> None:
    data = json.dumps(value).encode()
    start = draw.draw(st.integers(0, len(data)))
    end = draw.draw(st.integers(start, len(data)))
    broken = data[:start] + draw.draw(st.sampled_from([b"", b":", b'"', b",", b"9", b"\\", b"\xff", b"}"])) + data[end:]
    assert outcome(parse_json, broken) == outcome(told_slowly, broken)


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
    assert outcome(parse_json, text) == outcome(told_slowly, text)
    deepest = depth + {"": -1, "[]": 0, "[[]]": 1, '{"a": 1}': 1}.get(inner, 0)
    assert (outcome(parse_json, text)[0] == "refused") == (deepest > MAX_DEPTH)


@pytest.mark.parametrize(
    "text", ["1e999", "[1, -1e999, 2]", '{"a": [[0.5], [1e400]]}', "NaN", "[Infinity]", "9" * 5000]
)
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_json(text)


def test_an_ordinary_body_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_parse_slowly", None)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
    body = {
        "messages": [{"role": "user", "content": ["12:30 \u00e9", image]}],
        "seed": 1,
        "grid": [[0.5, -1], [2, None]],
    }
    assert parse_json(json.dumps(body)) == body
    assert parse_json(json.dumps(body, ensure_ascii=False).encode()) == body
