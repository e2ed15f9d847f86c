"""Command-line overrides of a file's values: `--set a.b=1` and flags. Used by `resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mstar_core.config.located import Located, parse_scalar
from mstar_core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One value from the command line. key: `kv_cache.pages`, `node_groups.0.ranks`. source: the flag as written."""

    key: str
    value: Any
    source: str


def parse_set(text: str) -> Override:
    """Parse the argument of `--set`: `KEY=VALUE` with a YAML value. Raises UsageError or ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"--set {text!r} must be KEY=VALUE", hint="--set kv_cache.pages=512")
    return Override(key=key.strip(), value=parse_scalar(value), source=f"--set {text}")


def apply(root: Located, overrides: Sequence[Override]) -> Located:
    """Return a copy of the tree with the overrides applied in order. Raises ConfigError for a path through a value."""
    result = _copy(root)
    for override in overrides:
        _put(result, override)
    return result


def _put(root: Located, override: Override) -> None:
    place = root
    *path, last = override.key.split(".")
    for word in path:
        place = _step(place, word, override, is_made=True)
    new = wrap(override.value, override.source)
    if isinstance(place.value, list):
        place.value[_index(place, last, override)] = new
    elif isinstance(place.value, dict):
        place.value[last] = new
    else:
        raise new.error(f"{override.key}: its parent must be a section", override.key)


def _step(place: Located, word: str, override: Override, *, is_made: bool) -> Located:
    if isinstance(place.value, list):
        found: Located = place.value[_index(place, word, override)]
        return found
    if not isinstance(place.value, dict):
        raise Located(None, override.source).error(f"{override.key}: {word!r} is below a plain value", override.key)
    if word not in place.value and is_made:
        place.value[word] = Located({}, override.source)
    step: Located = place.value[word]
    return step


def _index(place: Located, word: str, override: Override) -> int:
    count = len(place.value)
    if not word.isdigit() or int(word) >= count:
        hint = f"a number from 0 to {count - 1}" if count else "the list is empty"
        raise Located(None, override.source).error(
            f"{override.key}: {word!r} must be an index of the list", override.key, hint=hint
        )
    return int(word)


def wrap(value: Any, source: str) -> Located:
    """Wrap plain data with one source for all values."""
    if isinstance(value, dict):
        return Located({str(key): wrap(item, source) for key, item in value.items()}, source)
    if isinstance(value, list | tuple):
        return Located([wrap(item, source) for item in value], source)
    return Located(value, source)


def _copy(place: Located) -> Located:
    value = place.value
    if isinstance(value, dict):
        value = {key: _copy(item) for key, item in value.items()}
    elif isinstance(value, list):
        value = [_copy(item) for item in value]
    return Located(value, place.source, place.file, place.line)
