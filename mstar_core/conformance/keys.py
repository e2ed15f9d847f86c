"""Silver: the names of the published weights against the names in the model, without a byte of either."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping

from mstar_core.errors import PluginError, did_you_mean
from mstar_core.plugin.conformance import CheckSkipped, KeyMap, Subject

MODULE = "published"
FUNCTION = "key_map"


def key_map(subject: Subject) -> None:
    """Every published name has a place or is left out on purpose, and no place stays empty."""
    spec = subject.model
    if spec.model is None:
        raise CheckSkipped("this version carries no model code")
    if not spec.weights:
        return  # nothing is published, so nothing can be left over
    maps = _offered(spec.model)
    for name in spec.weights:
        if name not in maps:
            raise PluginError(f"the key map leaves out weights {name!r}", f"it has {', '.join(sorted(maps))}")
        _check(name, maps[name])


def _offered(target: str) -> Mapping[str, KeyMap]:
    package = target.partition(":")[0].rpartition(".")[0]
    module = f"{package}.{MODULE}"
    if not package or importlib.util.find_spec(module) is None:
        raise CheckSkipped(f"the plugin has no {module} with {FUNCTION}()")
    offered: Callable[[], Mapping[str, KeyMap]] = vars(importlib.import_module(module))[FUNCTION]
    return offered()


def _check(name: str, keys: KeyMap) -> None:
    wanted = {target for target in keys.targets.values() if target is not None}
    homeless = sorted(target for target in wanted if target not in keys.places)
    if homeless:
        raise PluginError(
            f"weights {name!r}: {homeless[0]} has no place in the model",
            f"{len(homeless)} of {len(keys.targets)} published names",
            did_you_mean(homeless[0], keys.places),
        )
    empty = sorted(keys.places - wanted)
    if empty:
        raise PluginError(
            f"weights {name!r}: nothing fills {empty[0]}",
            f"{len(empty)} of {len(keys.places)} places",
            did_you_mean(empty[0], wanted),
        )
