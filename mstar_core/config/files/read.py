"""Validation of located values against the schema: unknown keys, types, ranges. Called by `resolve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.config.files.faults import Faults
from mstar_core.config.key import ITEM, Setting
from mstar_core.config.located import Located
from mstar_core.config.schema import words_of
from mstar_core.errors import did_you_mean, nearest


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """A validated value. key: with indices (`node_groups.0.ranks`)."""

    key: str
    value: Any
    place: Located
    setting: Setting


def read(root: Located, faults: Faults) -> dict[str, CheckedValue]:
    """Return every valid value of the file by key, and collect the faults of the others."""
    if not isinstance(root.value, dict):
        raise root.error("the file must contain a mapping", "", hint="begin with model: NAME")
    return {value.key: value for value in _section(root, "", "", faults)}


def _section(place: Located, schema_key: str, key: str, faults: Faults) -> Iterator[CheckedValue]:
    words = words_of(schema_key)
    if not isinstance(place.value, dict):
        raise place.error(f"{key} is {shown(place)}", key, hint=f"a section with {', '.join(words)}")
    for word, item in place.value.items():
        full = f"{key}.{word}" if key else word
        with faults.collected():
            if word not in words:
                raise item.error(f"unknown key {full!r}", full, hint=did_you_mean(word, words))
            yield from _value(item, words[word], full, faults)
    meant = {nearest(word, words) for word in place.value if word not in words}
    for word, setting in words.items():
        if setting.required and word not in place.value and word not in meant:
            full = f"{key}.{word}" if key else word
            with faults.collected():
                raise place.error(f"key {full!r} is missing", full, setting.doc, hint=f"add {word}: {example(setting)}")


def example(item: Setting) -> str:
    """Return an example value of the setting's kind, for hints."""
    return {
        "list of string": "[NAME]",
        "list of integer": "[0]",
        "list of section": "[{node_names: [NAME], ranks: [0]}]",
    }.get(item.kind, "NAME")


def _value(place: Located, item: Setting, key: str, faults: Faults) -> Iterator[CheckedValue]:
    match item.kind:
        case "section":
            yield from _section(place, item.key, key, faults)
        case "list of section" if place.value is None and item.nullable:
            yield CheckedValue(key, None, place, item)
        case "list of section":
            if not isinstance(place.value, list) or not place.value:
                raise place.error(f"{key} is {shown(place)}", key, hint="a list with at least one entry")
            yield CheckedValue(key, len(place.value), place, item)
            for index, part in enumerate(place.value):
                with faults.collected():
                    yield from _section(part, item.key + ITEM, f"{key}.{index}", faults)
        case _:
            yield CheckedValue(key, check(place, item, key), place, item)


def check(place: Located, item: Setting, key: str) -> Any:
    """Validate one value of a plain kind. Raises ConfigError naming the allowed values."""
    value = place.value
    if value is None and item.nullable:
        return None
    if item.kind == "mapping":
        if not isinstance(value, dict):
            raise place.error(f"{key} is {shown(place)}", key, hint="a mapping of names to values")
        return place.plain()
    if item.kind.startswith("list of "):
        return _list(place, item, key)
    return _scalar(place, item, key)


def _list(place: Located, item: Setting, key: str) -> tuple[Any, ...]:
    if not isinstance(place.value, list) or not place.value:
        raise place.error(f"{key} is {shown(place)}", key, hint=f"a {item.kind} with at least one entry")
    values = tuple(
        _scalar(part, item, f"{key}.{index}", item.kind.removeprefix("list of "))
        for index, part in enumerate(place.value)
    )
    for index, value in enumerate(values):
        if value in values[:index] and not item.is_repeatable:
            raise place.value[index].error(f"{key} contains {value!r} twice", f"{key}.{index}", hint="list it once")
    return values


def _scalar(place: Located, item: Setting, key: str, kind: str = "") -> Any:
    value, kind = place.value, kind or item.kind
    if not fits(value, kind):
        raise place.error(f"{key} is {shown(place)}", key, f"allowed is {item.allowed}")
    if item.choices and value not in item.choices:
        raise place.error(f"{key} is {value!r}", key, hint=did_you_mean(value, item.choices))
    if kind == "string" and (not value.strip() or value != value.strip() or not value.isprintable()):
        raise place.error(f"{key} is {value!r}", key, hint="a printable text without leading or trailing blanks")
    if kind in ("integer", "number") and not item.contains(value):
        raise place.error(f"{key} is {value}", key, f"allowed is {item.allowed}\n{item.doc}")
    return float(value) if kind == "number" else value


_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "list": (list, tuple),
    "mapping": dict,
}


def fits(value: Any, kind: str) -> bool:
    """Return whether a value is of a kind. A boolean is never a number."""
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def shown(place: Located) -> str:
    """Return the value as an error message shows it."""
    value = place.value
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if value is None:
        return "empty"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
