"""Bodies with long strings: they parse to what json.loads gives, and errors name the place in the whole body."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mstar_core.api.http.long_strings import LONG_BYTES, cut
from mstar_core.api.http.strict_json import parse_json, parse_shortened
from mstar_core.errors import RequestError

LONG = "QUJD" * LONG_BYTES
SPACES = " " * (3 * LONG_BYTES)
BODIES: dict[str, Any] = {
    "a data URL": {"messages": [{"content": [{"image_url": {"url": f"data:image/png;base64,{LONG}"}}, {"text": "a"}]}]},
    "several": {"a": LONG, "b": [{"data": LONG + "=="}, {"data": LONG}], "c": 1},
    "in a list": {"images": [LONG, LONG], "n": 2},
    "the body itself": LONG,
    "escapes": {"text": LONG + '"\\\n' + LONG, "after": LONG},
    "characters beyond ASCII": {"text": f"{LONG}ü{LONG}", "after": LONG},
    "key and value within a string": {"text": '{"data":"' + LONG + '"}', "after": LONG},
    "quotes and colons of another kind": {"x,": ":", "y": SPACES},
    "a long key": {LONG: LONG},
    "many numbers": {"values": list(range(9000)), "data": LONG, "more": [0.5] * 9000},
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("form", [{"ensure_ascii": False}, {"indent": 3}, {"separators": (",", ":")}], ids=str)
def test_a_body_parses_to_its_value(name: str, form: dict[str, Any]) -> None:
    assert parse_json(json.dumps(BODIES[name], **form).encode()) == BODIES[name]


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_short_without_its_long_strings_parses_at_once(name: str) -> None:
    body = json.dumps(BODIES[name]).encode()
    short, strings = cut(body)
    found = parse_shortened(body, 4 * LONG_BYTES)
    assert found == (BODIES[name] if strings and len(short) <= 4 * LONG_BYTES else None)
    if strings:
        assert parse_shortened(body, len(short) - 1) is None


@pytest.mark.parametrize("end", [', "bad": }', "]", ', "data": 1}', "} more"])
def test_an_invalid_body_is_left_to_the_parser_of_whole_bodies(end: str) -> None:
    assert parse_shortened(('{"data": "' + LONG + '"' + end).encode(), 4 * LONG_BYTES) is None


def test_long_strings_are_cut_and_other_text_stays() -> None:
    body = json.dumps(BODIES["several"]).encode()
    short, strings = cut(body)
    assert sorted(strings.values()) == sorted([LONG, LONG + "==", LONG])
    assert len(short) < LONG_BYTES
    assert cut(json.dumps(BODIES["escapes"]["text"]).encode())[1] == {}


@pytest.mark.parametrize("space", [SPACES, SPACES + "\n"], ids=["spaces", "line"])
def test_space_between_quotes_is_no_string(space: str) -> None:
    body = '{"x,":":"' + space + ',"y":2}'
    assert parse_json(body.encode()) == json.loads(body)
    short, strings = cut(('{"a":"b","c":' + space + '"d"}').encode())
    assert not strings and len(short) > len(space)


def test_control_characters_in_a_long_string_are_refused_at_their_place() -> None:
    body = ('{"data": "' + LONG + '", "bad": "' + LONG + "\n" + LONG + '"}').encode()
    with pytest.raises(RequestError, match=f"line 1, column {body.index(10) + 1}"):
        parse_json(body)


def test_an_error_behind_a_long_string_names_the_place_in_the_whole_body() -> None:
    body = ('{"data": "' + LONG + '", "bad": }').encode()
    with pytest.raises(RequestError, match=f"column {body.index(b'}') + 1}"):
        parse_json(body)


def test_a_duplicate_key_with_long_strings_is_refused() -> None:
    with pytest.raises(RequestError, match="'data' is duplicated"):
        parse_json(('{"data": "' + LONG + '", "data": "' + LONG + '"}').encode())


def test_random_bodies_parse_as_the_standard_library_does() -> None:
    draw = random.Random(5)

    def value(depth: int) -> Any:
        match draw.randrange(7 if depth < 4 else 4):
            case 0:
                return draw.choice([None, True, 1.5, -3])
            case 1:
                return draw.choice(['":', "{,", '","', "\\", "ü", "", " : "]) * draw.randrange(3)
            case 2 | 3:
                return "".join(draw.choice(['"', "A", ",", "{"]) for _ in range(4)) + "B" * draw.choice([0, 40_000])
            case 4:
                return [value(depth + 1) for _ in range(draw.randrange(4))]
            case _:
                return {value_key(draw): value(depth + 1) for _ in range(draw.randrange(4))}

    for _ in range(60):
        body = json.dumps({"root": value(0)}, separators=draw.choice([(",", ":"), (", ", ": ")]))
        assert parse_json(body.encode()) == json.loads(body)


def value_key(draw: random.Random) -> str:
    """Return a key that may look like structure."""
    return draw.choice(["a", "data", '"', "{", ":", ",x", "k" * 70])
