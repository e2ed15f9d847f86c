"""Strict JSON: finite numbers, no duplicate keys, valid Unicode, bounded depth and size. Used by routes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any, Final, NoReturn

from mstar_core.api.http.long_strings import LONG_BYTES, cut
from mstar_core.errors import RequestError

MAX_DEPTH: Final = 32
MAX_LIST: Final = 4_000_000
MAX_VALUES: Final = MAX_LIST + 65_536
"""Limit of values in a body, estimated by commas before parsing, because a small object takes 232 bytes of memory."""

_FLAT: Final = frozenset({int, float, bool, type(None)})


def parse_json(data: bytes | bytearray | str, what: str = "the body") -> Any:
    """Parse one JSON value. Raises RequestError (`invalid_json`) with the position of the error."""
    if not isinstance(data, str) and len(data) > 2 * LONG_BYTES:
        short, strings = cut(data)
        if strings:
            try:
                return _parsed(short, what, partial(_object_of, strings))
            except RequestError:
                pass  # parsed again, whole, for the position of the error
    return _parsed(data, what, _object)


def _parsed(data: bytes | bytearray | str, what: str, hook: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
    if (data.count(",") if isinstance(data, str) else data.count(b",")) >= MAX_VALUES:
        raise bad_json(what, f"it has more than {MAX_VALUES} values")
    try:
        text = data if isinstance(data, str) else data.decode()
        value = json.loads(text, object_pairs_hook=hook, parse_constant=_constant)
    except RecursionError as error:
        raise bad_json(what, f"it is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise bad_json(what, f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise bad_json(what, f"byte {error.start} is not UTF-8") from error
    except _Refused as error:
        raise bad_json(what, str(error)) from error
    except ValueError as error:
        raise bad_json(what, "a number has too many digits") from error
    _check(value, what)
    return value


def parse_object(data: bytes | bytearray | str, what: str = "the body") -> dict[str, Any]:
    """Parse a JSON object. Raises RequestError for any other value."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise bad_json(what, "it must be an object")
    return value


def parse_shortened(data: bytes | bytearray, most: int) -> dict[str, Any] | None:
    """Parse the JSON object of a body with at most `most` bytes beside its long strings, which takes 0.1 ms/MB.

    Returns None for any other body and for an invalid one, for which `parse_object` finds the error.
    """
    short, strings = cut(data)
    if not strings or len(short) > most:
        return None
    try:
        value = _parsed(short, "the body", partial(_object_of, strings))
    except RequestError:
        return None
    return value if isinstance(value, dict) else None


def bad_json(what: str, why: str) -> RequestError:
    """Return the error for invalid JSON."""
    return RequestError(
        f"{what} is not valid JSON: {why}", code="invalid_json", field=None if what == "the body" else what
    )


class _Refused(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise _Refused(f"the key {counts.most_common(1)[0][0][:40]!r} is duplicated")
    return fields


def _object_of(strings: Mapping[str, str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with the strings that were cut out in place of their marks."""
    return _object([(key, strings.get(value, value) if type(value) is str else value) for key, value in pairs])


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a valid number")


def _check(root: Any, what: str) -> None:
    """Refuse values that are too deep, too long, too large or not valid Unicode."""
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value, what)
            elif isinstance(value, float):
                _check_finite(value in (inf, -inf), what)
            elif isinstance(value, dict):
                deeper.extend(value)
                deeper.extend(value.values())
            elif isinstance(value, list):
                deeper.extend(_items_to_check(value, what))
        if not deeper:
            return
        level = deeper
    raise bad_json(what, f"it is nested deeper than {MAX_DEPTH} levels")


def _items_to_check(items: list[Any], what: str) -> list[Any]:
    """Return the items to check further: all, or one of many numbers, which are checked here in bulk for speed."""
    if len(items) > MAX_LIST:
        raise bad_json(what, f"a list has more than {MAX_LIST} items")
    if not set(map(type, items)) <= _FLAT:
        return items
    _check_finite(inf in items or -inf in items, what)
    return items[:1]


def _check_finite(is_infinite: bool, what: str) -> None:
    if is_infinite:
        raise bad_json(what, "a number is too large")


def _check_text(text: str, what: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise bad_json(what, "a string has an unpaired surrogate") from error
