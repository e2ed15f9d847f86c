"""Words that shells complete, from package metadata: nothing of any plugin is imported, no error is ever shown."""

from __future__ import annotations

from importlib import metadata


def plugin_names(incomplete: str) -> list[str]:
    """Installed plugins that begin so; a plugin is called as its main model is."""
    names = {point.name for point in metadata.entry_points(group="mstar.plugins")}
    return sorted(name for name in names if name.startswith(incomplete))


def key_names(incomplete: str) -> list[str]:
    """Keys of deployment files that begin so."""
    from mstar_core.config import SETTINGS

    return [item.key for item in SETTINGS if item.key.startswith(incomplete)]
