"""JSON as requests may send it: finite numbers, no key twice, whole characters, bounded depth. Used by routes."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from mstar_core.errors import RequestError

MAX_DEPTH: Final = 32
MAX_LIST: Final = 4_000_000
MAX_VALUES: Final = MAX_LIST + 65_536
"""Values of a body, counted by the commas between them before anything is made: a small object takes 232 bytes."""


def parse_json(data: bytes | str, what: str = "the body") -> Any:
    """Read one JSON value. Raises RequestError (`invalid_json`) saying where it is wrong."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        if text.count(",") >= MAX_VALUES:
            raise bad_json(what, f"it has more than {MAX_VALUES} values")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise bad_json(what, f"it is nested more than {MAX_DEPTH} deep") from error
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


def parse_object(data: bytes | str, what: str = "the body") -> dict[str, Any]:
    """Read a JSON object. Raises RequestError for any other value."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise bad_json(what, "it is not an object")
    return value


def bad_json(what: str, why: str) -> RequestError:
    """What the client is told."""
    return RequestError(
        f"{what} is not valid JSON: {why}", code="invalid_json", field=None if what == "the body" else what
    )


class _Refused(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add
        raise _Refused(f"the key {twice[:40]!r} stands twice")
    return made


def _constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is not a number")


def _check(root: Any, what: str) -> None:
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value, what)
            elif isinstance(value, float):
                if value in (float("inf"), float("-inf")):
                    raise bad_json(what, "a number is too large")
            elif isinstance(value, dict):
                deeper.extend(value)
                deeper.extend(value.values())
            elif isinstance(value, list):
                if len(value) > MAX_LIST:
                    raise bad_json(what, f"a list has more than {MAX_LIST} items")
                deeper.extend(value)
        if not deeper:
            return
        level = deeper
    raise bad_json(what, f"it is nested more than {MAX_DEPTH} deep")


def _check_text(text: str, what: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise bad_json(what, "a string holds half a character") from error
