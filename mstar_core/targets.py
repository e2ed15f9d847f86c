"""Import of objects by name. Targets keep heavy modules out of the processes that only pass their names on."""

from __future__ import annotations

import importlib
from typing import Any

from mstar_core.errors import PluginError


def load_target(target: str) -> Any:
    """Import the object that "pkg.mod:name" names. Raises PluginError if the module has no such name."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise PluginError(f"{module} has no {name!r}", hint="install the version that has it", phase="import")
        found = getattr(found, part)
    return found
