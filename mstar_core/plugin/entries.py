"""Stage 0 of loading: what package metadata says about plugins. Imports nothing of any plugin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from mstar_core.errors import NotFound, PluginError, did_you_mean
from mstar_core.plugin.spec import API_VERSION

GROUP: Final = "mstar.plugins"
"""The entry point group. A plugin's entry names the module that holds its hooks."""

__all__ = ["API_VERSION", "GROUP", "PluginEntry", "allowed_names", "find_entry", "plugin_entries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginEntry:
    """One installed plugin as its metadata tells. target: "pkg.module". requires: requirement lines."""

    name: str
    target: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()


def plugin_entries() -> tuple[PluginEntry, ...]:
    """Every installed plugin, by name. Reads metadata only."""
    found: dict[tuple[str, str], PluginEntry] = {}
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        entry = PluginEntry(
            name=point.name,
            target=point.value,
            distribution=dist.name if dist is not None else "unknown",
            version=dist.version if dist is not None else "0",
            requires=tuple(dist.requires or ()) if dist is not None else (),
        )
        found.setdefault((entry.name, entry.distribution), entry)
    return tuple(sorted(found.values(), key=lambda entry: (entry.name, entry.distribution)))


def find_entry(name: str, entries: tuple[PluginEntry, ...] | None = None) -> PluginEntry:
    """The plugin called `name` (entry or distribution). Raises NotFound with the nearest name."""
    known = plugin_entries() if entries is None else entries
    for entry in known:
        if name in (entry.name, entry.distribution):
            return entry
    hint = did_you_mean(name, [entry.name for entry in known])
    raise NotFound(f"no plugin {name!r} is installed", hint=hint, kind="plugin", name=name)


def allowed_names(
    entries: tuple[PluginEntry, ...], environment: Mapping[str, str] | None = None
) -> frozenset[str] | None:
    """Names in MSTAR_PLUGINS, None when it is not set. Raises PluginError for a name that is not installed."""
    text = (os.environ if environment is None else environment).get("MSTAR_PLUGINS")
    if text is None:
        return None
    names = frozenset(part.strip() for part in text.split(",") if part.strip())
    for name in sorted(names):
        try:
            find_entry(name, entries)
        except NotFound as error:
            raise PluginError(f"MSTAR_PLUGINS: {error.title}", hint=error.hint, plugin=name) from None
    return names
