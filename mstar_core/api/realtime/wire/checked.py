"""Checks of client events: types of fields, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from mstar_core.api.routes.fields import refused
from mstar_core.errors import RequestError, did_you_mean

F = TypeVar("F", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")


def checked(body: Mapping[str, Any], kind: type[F], place: str = "") -> F:
    """Return `body` as `kind`. place: its path in the event. Raises RequestError."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.match(str(error))
        if unknown is not None:
            raise _unknown(unknown["name"], _joined(place, unknown["path"] or "")) from error
        raise placed(refused(str(error), kind), place) from error


def placed(error: RequestError, place: str) -> RequestError:
    """Let an error name the field as it stands in the event."""
    if place and error.field is not None and not error.field.startswith(place):
        error.facts["field"] = _joined(place, error.field)
    elif place and error.field is None:
        error.facts["field"] = place
    return error


def _joined(place: str, path: str) -> str:
    return ".".join(part for part in (place, path) if part)


def _unknown(name: str, place: str) -> RequestError:
    field = _joined(place, name[:80])
    return RequestError(f"{field} does not exist", hint="omit it", field=field, code="unknown_parameter")


def missing(place: str, kinds: Mapping[str, object], sent: object) -> RequestError:
    """Return the error for a `type` that is missing or unknown. kinds: the known ones."""
    if sent is None:
        return RequestError(f"{place} is missing", hint=did_you_mean("", kinds), field=place, code="missing_field")
    if not isinstance(sent, str):
        return RequestError(f"{place} must be a string", field=place)
    return RequestError(f"{place} is {sent[:80]!r}", hint=did_you_mean(sent, kinds), field=place)
