"""Keys of a deployment file, in order, and the values of a configuration by key. Read by checks, docs and `config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from mstar_core.config.key import ITEM, Setting, settings_of
from mstar_core.config.resolved import ResolvedConfig

SETTINGS: Final[tuple[Setting, ...]] = tuple(settings_of(ResolvedConfig))
SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    field.name: type(field.default)
    for field in msgspec.structs.fields(ResolvedConfig)
    if isinstance(field.default, msgspec.Struct)
}
"""Records of the sections by name."""


def words_of(parent: str) -> dict[str, Setting]:
    """Return the settings of a section by their last part; "" is the top."""
    return {item.word: item for item in SETTINGS if item.parent == parent}


def values_of(config: ResolvedConfig) -> dict[str, Any]:
    """Return every value by its key, as `config show --resolved` prints them. Lists are lists, as in a file."""
    values = dict(_values(config, "", ""))
    return values | {"model": f"{config.model}:{config.variant}" if config.variant else config.model}


def _values(record: msgspec.Struct, section: str, prefix: str) -> Iterator[tuple[str, Any]]:
    for word, item in words_of(section).items():
        value, key = getattr(record, word), f"{prefix}{word}"
        match item.kind:
            case "section":
                yield from _values(value, item.key, f"{key}.")
            case "list of section" if value:
                for index, part in enumerate(value):
                    yield from _values(part, item.key + ITEM, f"{key}.{index}.")
            case "mapping" if not section:
                yield from ((f"{key}.{name}", part) for name, part in value.items())
            case _:
                yield key, list(value) if isinstance(value, tuple) else value
